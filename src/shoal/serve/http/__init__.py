"""serve.http: OpenAI's endpoints: connections, limits, requests, answers and their streams."""
