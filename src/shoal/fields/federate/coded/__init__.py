"""coded: full-batch gradients from workers some of which are slow now and then.

Start reading at ``protocols.py``, then ``gc.py``, ``m_sgc.py`` and ``execute.py``.
"""

from shoal.core.parts import PartTable

__all__ = ["CODED_SCHEMES"]

CODED_SCHEMES = PartTable(
    "coded_scheme",
    {
        "uncoded": "shoal.fields.federate.coded.gc:Uncoded",
        "gc": "shoal.fields.federate.coded.gc:Gc",
        "sr_sgc": "shoal.fields.federate.coded.sr_sgc:SrSgc",
        "m_sgc": "shoal.fields.federate.coded.m_sgc:MSgc",
    },
    about=(
        "How gradients are divided over workers and rounds, so that slow workers need not be "
        "waited for. Chosen by the key `scheme` of a job with `job: coded_training`."
    ),
    protocol="shoal.fields.federate.coded.protocols:CodedScheme",
)
