"""serve.decode.draft: smaller models that guess for a larger one."""
