"""Plans of an embedding: every method, by the size of the graph and the rates of the machine."""

from __future__ import annotations

from shoal.core.parts import Choice, table
from shoal.fields.graph.embedding.costs import rates_of
from shoal.fields.graph.embedding.inputs import graph_of_job, judged_nodes
from shoal.fields.graph.embedding.job import EmbedNodesJob, EmbedNodesPlan
from shoal.fields.graph.embedding.protocols import EmbedWork, NodeEmbedder
from shoal.fields.kinds import choices
from shoal.ir import Interval, Machine

# The interpreter with numpy, SciPy and scikit-learn, as it was measured.
_RUNTIME = 2.2e8
# Bytes of a graph while it is read and put into rows, for each entry.
_READING = 40.0


def plan_embedding(job: EmbedNodesJob, machine: Machine) -> list[EmbedNodesPlan]:
    """The ways to do it, the fastest first; what does not fit comes last.

    Raises:
        ShoalError: the graph cannot be read.
    """
    graph = graph_of_job(job)
    judged = judged_nodes(job, graph)
    work = EmbedWork(
        num_nodes=graph.num_nodes,
        nnz=graph.nnz,
        tuning=0 if judged is None else len(judged[0].tuning),
        threads=min(job.threads, machine.device.num_cores or job.threads),
        rates=rates_of(machine),
    )
    plans = [_plan(job, machine, choice, work) for choice in choices(job.method, "node_embedder")]
    return sorted(plans, key=lambda plan: (not plan.fits, plan.predicted["embed_s"].value))


def _plan(job: EmbedNodesJob, machine: Machine, choice: Choice, work: EmbedWork) -> EmbedNodesPlan:
    method: NodeEmbedder = table("node_embedder").build(choice, where="method")
    cost = method.estimate(work, machine)
    memory = cost.memory_total + _RUNTIME + _READING * work.nnz
    spelled = table("node_embedder").spell(method)
    most = max(cost.terms_s, key=lambda name: cost.terms_s[name])
    return EmbedNodesPlan(
        job=job.model_copy(update={"method": spelled}),
        machine=machine,
        predicted={
            "embed_s": cost.step_s,
            "memory_bytes": Interval.around(memory, 0.4),
            "vector_bytes": Interval.exact(4.0 * work.num_nodes * method.dim + 128),
        },
        planner="rates of this processor",
        fits=memory <= machine.device.main_memory.capacity_bytes,
        why=f"{spelled}: {work.num_nodes:,} nodes, {work.nnz:,} entries; most time in {most}",
        num_nodes=work.num_nodes,
        nnz=work.nnz,
    )
