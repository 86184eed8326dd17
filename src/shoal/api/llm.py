"""Offline inference: many prompts at once, in this process, with the interface of vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from shoal.api.inputs import ErrorPlace, place_of, read_conversations, read_params, read_prompts
from shoal.api.jobs import read_job
from shoal.api.loading import model_directory
from shoal.api.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
)
from shoal.api.progress import AnswerBar
from shoal.api.sampling import SamplingOptions
from shoal.core.errors import ServeError, require
from shoal.ir import Output, ServeJob, kind_named
from shoal.ir.serving import FinishReason, TokenInfo

if TYPE_CHECKING:
    from shoal.serve.http.answer import ResponseBuilder
    from shoal.serve.http.writers import GenerationJob
    from shoal.serve.text.pieces import TextModel


class LLM:
    """A language model in this process that answers many prompts together.

    It is the engine of ``shoal serve`` without the server: the same parts, the same continuous
    batching and the same checks, so the same prompt gets the same answer. Calls are for one thread
    at a time. Use it as a context manager, or :meth:`close` it, to get its memory back.

    Args:
        model: a Hugging Face directory with a ``tokenizer.json``, or the directory of a training
            run, of which it takes the exported model.
        **fields: of :class:`~shoal.ir.ServeJob`, such as ``precision="bf16"``, ``max_running=64``,
            ``kv_tokens=100_000``, ``speculative="ngram"`` or ``threads=2``. ``threads`` = 0 is
            every core.

    Attributes:
        job: what is served.

    Raises:
        ShoalError: there is no such model, it cannot be read, or a field is wrong.
    """

    def __init__(self, model: str | os.PathLike[str], **fields: Any) -> None:
        directory = model_directory(model)
        kind = kind_named("serve")
        resolved = read_job({"model": str(directory)}, kind, None, fields, environment={})
        self.job: ServeJob = resolved.value

        from shoal.api.requests import RequestReader
        from shoal.corpora.chat.template import load_template
        from shoal.serve.engine.offline import OfflineEngine
        from shoal.serve.text.pieces import TextModel

        # What may be wrong with small files is known before weights are read.
        self._text = TextModel(directory)
        template = load_template(directory)
        self._engine = OfflineEngine(self.job)
        try:
            served = self._engine.model
            require(
                served.workers == 1,
                "decode",
                self.job.decode.name,
                expected="one that has no workers: they answer the chats of shoal serve",
                error=ServeError,
            )
            self._text.check(served.vocab_size)
            self._reader = RequestReader(self.job, self._text, template, served)
        except BaseException:
            self._engine.close()
            raise

    def __repr__(self) -> str:
        closed = ", closed" if self._engine.closed else ""
        return f"LLM({self.job.model!r}{closed})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and give its memory back; calls afterwards are refused."""
        self._engine.close()

    def stats(self) -> dict[str, float]:
        """Counters since the start, such as ``steps_total`` and ``prefix_hit_tokens``.

        Raises:
            ServeError: the engine is closed.
        """
        return self._engine.stats()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingOptions | Sequence[SamplingOptions] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts; all of them together, in the order of the scheduler.

        Args:
            prompts: a text, several, or the token ids of several.
            sampling_params: for all prompts, or one for each; the defaults if not given.
            use_tqdm: show a progress bar, if stderr is a terminal.
            adapter: one of the job's ``adapters``; None for the model itself.

        Returns:
            A prompt with its answers, in the order of the prompts.

        Raises:
            ServeError: a prompt or an option is wrong, which is known before anything is computed;
                or the engine is closed or failed.
        """
        items = read_prompts(prompts)
        params = read_params(sampling_params, len(items))
        jobs = []
        for place, (prompt, one) in enumerate(zip(items, params, strict=True)):
            options = place_of("sampling_params", sampling_params, place)
            with ErrorPlace(place_of("prompts", prompts, place), options):
                jobs.append(self._reader.completion(prompt, one))
        return self._run(jobs, adapter, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingOptions | Sequence[SamplingOptions] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Answer chats, through the model's chat template.

        Args:
            messages: a conversation, ``[{"role": "user", "content": "Hello"}]``, or several.
            sampling_params: for all conversations, or one for each; the defaults if not given.
            add_generation_prompt: end the prompt where the assistant's answer begins.
            tools: functions that answers may call, as OpenAI's clients give them. Calls are in
                the text of the answer, as the model writes them.
            chat_template_kwargs: further names for the template, such as ``enable_thinking``.
            use_tqdm: show a progress bar, if stderr is a terminal.
            adapter: one of the job's ``adapters``; None for the model itself.

        Returns:
            A conversation's prompt with its answers, in the order of the conversations.

        Raises:
            ServeError: see :meth:`generate`; or the template refuses the messages.
        """
        chats = read_conversations(messages)
        params = read_params(sampling_params, len(chats))
        values = self._reader.template_values(tools, chat_template_kwargs, add_generation_prompt)
        jobs = []
        for place, (chat, one) in enumerate(zip(chats, params, strict=True)):
            where = place_of("messages", messages if len(chats) > 1 else None, place)
            with ErrorPlace(where, place_of("sampling_params", sampling_params, place)):
                jobs.append(self._reader.chat(chat, values, one))
        return self._run(jobs, adapter, use_tqdm)

    def embed(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Literal["mean", "last"] = "mean",
        normalize: bool = True,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Vectors of texts: of the final hidden states of their tokens.

        Args:
            prompts: a text, several, or the token ids of several.
            pooling: the mean of all states, or the last one.
            normalize: vectors of length 1.
            dimensions: numbers to keep of each vector, the first ones; None for all.
            use_tqdm: show a progress bar, if stderr is a terminal.

        Raises:
            ServeError: see :meth:`generate`.
        """
        options = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
        asks, requests = [], []
        for place, prompt in enumerate(read_prompts(prompts)):
            with ErrorPlace(place_of("prompts", prompts, place), "options"):
                ask, request = self._reader.embedding(prompt, options)
                asks.append(ask)
                requests.append(request)
        sizes = {request.id: request.n_prompt for request in requests}
        vectors: dict[str, list[float]] = {}
        with AnswerBar(len(requests), shown=use_tqdm) as bar:

            def count(output: Output) -> bool:
                bar.add(sizes[output.request_id], ended=output.finish is not None)
                return False

            def take(message: Mapping[str, Any]) -> None:
                vectors[message["id"]] = message["values"]

            self._engine.run(requests, count, {"vector": take})
        return [
            EmbeddingRequestOutput(
                request.id,
                request.tokens[: request.n_prompt],
                EmbeddingOutput(ask.vector(vectors[request.id]).tolist()),
            )
            for ask, request in zip(asks, requests, strict=True)
        ]

    def _run(
        self, jobs: Sequence[GenerationJob], adapter: str | None, shown: bool
    ) -> list[RequestOutput]:
        """The answers to prompts, once all have ended."""
        adapter = self._reader.adapter(adapter)
        requests, answers = [], {}
        for job in jobs:
            for index, builder in enumerate(job.answers):
                request = job.request(index, adapter=adapter)
                requests.append(request)
                answers[request.id] = _Answer(builder)
        with AnswerBar(len(requests), shown=shown) as bar:

            def take(output: Output) -> bool:
                answer = answers[output.request_id]
                ended = answer.feed(output)
                bar.add(len(output.tokens), ended=ended)
                return ended

            def score(message: Mapping[str, Any]) -> None:
                answers[message["id"]].score(message)

            self._engine.run(requests, take, {"prompt_logprobs": score})
        results = []
        for job in jobs:
            own = [answers[f"{job.id}-{index}"] for index in range(len(job.answers))]
            tokens = list(job.prompts[0].tokens)
            scored = job.params[0].prompt_logprobs is not None
            results.append(
                RequestOutput(
                    job.id,
                    job.prompts[0].text,
                    tokens,
                    [
                        answer.output(index, job.ask.logprobs, self._text)
                        for index, answer in enumerate(own)
                    ],
                    own[0].prompt(tokens, self._text) if scored else None,
                )
            )
        return results


class _Answer:
    """What has come of an answer."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._infos: list[TokenInfo] = []
        self._finish: FinishReason | None = None

    def score(self, message: Mapping[str, Any]) -> None:
        """Take in log probabilities of the prompt."""
        self._builder.score(message)

    def prompt(self, tokens: Sequence[int], text: TextModel) -> list[dict[int, Logprob] | None]:
        """Those of every token of the prompt but the first."""
        scored = self._builder.scores(tokens)
        infos = (TokenInfo(value, tuple(best)) for value, best in scored)
        pairs = zip(tokens[1:], infos, strict=True)
        return [None, *(_logprobs(*pair, text) for pair in pairs)]

    def feed(self, output: Output) -> bool:
        """Take in what a step gave; whether it was the last."""
        piece = self._builder.feed([output])
        self._texts.append(piece.text)
        self._tokens += piece.tokens
        self._infos += output.infos[: len(piece.tokens)]
        self._finish = piece.finish
        return piece.finish is not None

    def output(self, index: int, logprobs: int | None, text: TextModel) -> CompletionOutput:
        """All of it."""
        assert self._finish is not None
        pairs = zip(self._tokens, self._infos, strict=True)
        return CompletionOutput(
            index,
            "".join(self._texts),
            self._tokens,
            self._finish,
            None if logprobs is None else [_logprobs(*pair, text) for pair in pairs],
        )


def _logprobs(token: int, info: TokenInfo, text: TextModel) -> dict[int, Logprob]:
    """The token that was chosen, and the best ones."""
    ranked = {one: (value, rank) for rank, (one, value) in enumerate(info.top, 1)}
    values: dict[int, tuple[float, int | None]] = {token: (info.logprob, None), **ranked}
    return {
        one: Logprob(value, rank, text.token_bytes(one).decode(errors="replace"))
        for one, (value, rank) in values.items()
    }
