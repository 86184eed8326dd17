"""Messages between the two processes."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ServeError
from shoal.ir.serving import Output, SamplingParams, TokenInfo
from shoal.serve.engine.frames import MAX_FRAME_BYTES, Decoder, encode
from shoal.serve.engine.wire import pack_output, pack_params, unpack_output, unpack_params

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(messages=st.lists(st.dictionaries(st.text(), VALUES)), cuts=st.lists(st.integers(1, 9)))
def test_messages_survive_any_cutting(messages, cuts):
    data = b"".join(map(encode, messages))
    decoder = Decoder()
    got = []
    for cut in cuts:
        got += decoder.feed(data[:cut])
        data = data[cut:]
    got += decoder.feed(data)
    assert got == messages


def test_a_length_beyond_the_cap_is_refused():
    with pytest.raises(ServeError, match="expected at most"):
        list(Decoder().feed(struct.pack(">I", MAX_FRAME_BYTES + 1)))
    with pytest.raises(ServeError, match="expected at most"):
        encode({"a": "x" * MAX_FRAME_BYTES})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\x80\x04N.", b"[" * 9000])
def test_what_is_no_object_is_refused(body):
    with pytest.raises(ServeError, match="JSON"):
        list(Decoder().feed(struct.pack(">I", len(body)) + body))


def test_outputs_and_params_come_back():
    params = SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_k=3,
        seed=2**62,
        stop_ids=frozenset({1, 9}),
        logprobs=2,
        logit_bias=((3, -0.5), (4, 100.0)),
        min_tokens=2,
    )
    assert unpack_params(json.loads(json.dumps(pack_params(params)))) == params
    output = Output("a", (1, 2), (TokenInfo(-0.5, ((1, -0.5), (3, float("-inf")))),), "stop")
    assert unpack_output(json.loads(json.dumps(pack_output(output)))) == output
