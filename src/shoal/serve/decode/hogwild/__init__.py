"""serve.decode.hogwild: workers of one model that write at once and see each other's tokens.

``blocks`` keeps keys that can stand anywhere, ``views`` orders them for each reader, ``attention``
mixes, ``forward`` computes all workers together; a layout says what stands where, ``session`` runs
the workers of one request, and ``engine`` those of all requests.
"""
