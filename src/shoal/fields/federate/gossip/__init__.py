"""gossip: training without a server; nodes exchange messages with their neighbours on a graph.

Start reading at ``protocols.py``, then ``averaging.py``, ``virtual.py`` and ``process.py``.
"""

from shoal.core.parts import PartTable

__all__ = ["GOSSIP_POLICIES", "TOPOLOGIES"]

_HERE = "shoal.fields.federate.gossip"

TOPOLOGIES = PartTable(
    "topology",
    {
        "cycle": f"{_HERE}.topologies:Cycle",
        "path": f"{_HERE}.topologies:PathTopology",
        "star": f"{_HERE}.topologies:StarTopology",
        "complete": f"{_HERE}.topologies:Complete",
        "ring_k": f"{_HERE}.topologies:RingK",
        "grid": f"{_HERE}.topologies:GridTopology",
        "barbell": f"{_HERE}.topologies:Barbell",
        "k_regular": f"{_HERE}.topologies:KRegular",
        "barabasi_albert": f"{_HERE}.topologies:BarabasiAlbert",
        "small_world": f"{_HERE}.topologies:SmallWorld",
        "edge_list": f"{_HERE}.topologies:EdgeList",
    },
    about=("Which nodes are neighbours. Chosen by the key `topology` of a job with `job: gossip`."),
    protocol=f"{_HERE}.protocols:Topology",
)

GOSSIP_POLICIES = PartTable(
    "gossip_policy",
    {
        "plain": f"{_HERE}.averaging:PlainAverage",
        "variance_corrected": f"{_HERE}.variance_corrected:VarianceCorrected",
        "partitioned": f"{_HERE}.partitioned:Partitioned",
        "dadao": f"{_HERE}.dadao:Dadao",
    },
    about=(
        "What nodes send to each other, when, and what they do with it. Chosen by the key "
        "`policy` of a job with `job: gossip`."
    ),
    protocol=f"{_HERE}.protocols:GossipPolicy",
)
