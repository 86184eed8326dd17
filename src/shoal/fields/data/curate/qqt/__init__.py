"""qqt: choosing quality pools for a budget of training samples, by what repetition leaves of them.

Start reading at ``rows.py``, the method of the job ``curate``; the law is
``shoal.cost.scaling.repetition``. ``QQT`` has the same in Python, for curves measured elsewhere.
"""

from shoal.fields.data.curate.qqt.curves import QQT

__all__ = ["QQT"]
