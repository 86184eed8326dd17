"""core: config, parts, errors, files, randomness, meter, pool, measuring, native code.

The ground floor: it depends on no other room. Import from its modules.
"""
