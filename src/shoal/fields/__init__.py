"""fields: the table of the kinds of job, and a room for each field beside training and serving."""

from shoal.core.parts import PartTable

__all__ = ["JOBS"]

JOBS = PartTable(
    "job",
    {
        "train": "shoal.train.kind:TrainKind",
        "serve": "shoal.serve.kind:ServeKind",
        "drafter": "shoal.train.drafters.kind:DrafterKind",
        "cluster": "shoal.fields.data.cluster.kind:ClusterKind",
        "curate": "shoal.fields.data.curate.kind:CurateKind",
        "mine": "shoal.fields.data.mine.kind:MineKind",
        "parse_logs": "shoal.fields.data.logs.kind:ParseLogsKind",
        "sparse_code": "shoal.fields.data.sparse_coding.kind:SparseCodeKind",
        "dedupe": "shoal.fields.data.dedupe.kind:DedupeKind",
        "prepare": "shoal.fields.data.prepare.kind:PrepareKind",
    },
    about=(
        "A kind of job: what is planned, run and scored. Chosen by the first word after "
        "`shoal plan` and `shoal run`."
    ),
    protocol="shoal.ir.job_kind:JobKind",
)
