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
        "federate": "shoal.fields.federate.kind:FederateKind",
        "solve_vi": "shoal.fields.federate.vi.kind:SolveViKind",
        "coded_training": "shoal.fields.federate.coded.kind:CodedKind",
        "gossip": "shoal.fields.federate.gossip.kind:GossipKind",
        "train_experts": "shoal.fields.federate.ddm.kind:TrainExpertsKind",
        "rank_peers": "shoal.fields.retrieve.grank.kind:RankPeersKind",
        "index": "shoal.fields.retrieve.index.kind:IndexKind",
        "recommend": "shoal.fields.retrieve.recommend.kind:RecommendKind",
        "search": "shoal.fields.retrieve.search.kind:SearchKind",
        "train_towers": "shoal.fields.retrieve.towers.kind:TrainTowersKind",
        "search_functions": "shoal.fields.retrieve.serverless.kind:SearchFunctionsKind",
        "datastore": "shoal.fields.retrieve.datastore.kind:DatastoreKind",
        "embed_nodes": "shoal.fields.graph.embedding.kind:EmbedNodesKind",
        "communities": "shoal.fields.graph.communities.kind:CommunitiesKind",
        "train_deep_gnn": "shoal.fields.graph.deep.kind:TrainDeepGnnKind",
        "train_gnn": "shoal.fields.graph.gnn.kind:TrainGnnKind",
    },
    about=(
        "A kind of job: what is planned, run and scored. Chosen by the first word after "
        "`shoal plan` and `shoal run`."
    ),
    protocol="shoal.ir.job_kind:JobKind",
)
