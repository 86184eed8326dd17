"""What guesses the next tokens of a target: the nets, one file each, and their directory.

``medusa`` heads on the last hidden state, ``falcon`` a net over features that guesses several at
once, ``ppd`` embeddings of prompt tokens, ``fusion`` a gate and a few layers. They know
arithmetic; how they are trained is :mod:`shoal.train.drafters`. ``files`` keeps a trained one
together with what it was trained for.
"""
