"""serve.text: prompts and answers as text: tokens, templates, tools, grammars."""
