"""Chat templates rendered beside the server, in a process that can be killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.corpora.chat.template import ChatTemplate, TemplateLimitError
from shoal.serve.text.confined import ConfinedProcess

MAX_RENDER_S = 1.0


class TemplateRenderer:
    """Renders a chat template in a separate process, with limits of time and memory.

    Args:
        seconds: most s of a prompt.
    """

    def __init__(self, template: ChatTemplate, *, seconds: float = MAX_RENDER_S) -> None:
        self.template, self._seconds = template, seconds
        self._worker = ConfinedProcess("shoal.serve.text.template_worker", seconds)

    async def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The prompt for an answer to the messages; see :meth:`ChatTemplate.render`.

        Raises:
            TemplateLimitError: the template refuses them, fails, or takes too much.
        """
        template = self.template
        question: dict[str, Any] = {"source": template.source, "where": template.where}
        question |= {"names": {**template.tokens, **values}, "messages": list(messages)}
        try:
            answer = await self._worker.ask(question)
        except TimeoutError:
            why = f"no prompt within {self._seconds:g} s"
        except EOFError:
            why = "it exceeds the memory limit of templates"
        else:
            if answer["kind"] == "bad":
                raise TemplateLimitError(answer["message"])
            text: str = answer["text"]
            return text
        raise TemplateLimitError(
            f"{template.where}: stopped: {why}; send fewer or shorter messages"
        ) from None

    async def stop(self) -> None:
        """End the process."""
        await self._worker.stop()
