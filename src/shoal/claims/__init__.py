"""claims: does the paper hold on this machine? Experiments, verdicts and the catalogue.

An experiment only collects raw samples; the frame alone judges them, so anyone can
recompute a verdict from a results file. Start reading at ``protocols.py``, then
``judge.py`` and ``run.py``.
"""

from shoal.core.parts import PartTable

__all__ = ["CLAIMS", "STUDIES"]

STUDIES = PartTable(
    "study",
    {
        "autotp": "shoal.parallel.autotp.autotp_study:AutotpStudy",
        "balance": "shoal.plan.balance.sequences.balance_study:BalanceStudy",
        "compile": "shoal.kernel.tile.compile_study:CompileStudy",
        "context": "shoal.cost.context.study:ContextStudy",
        "decode": "shoal.model.drafters.decode_study:DecodeStudy",
        "duo": "shoal.claims.bench.duo_study:DuoStudy",
        "fold": "shoal.plan.experts.fold_study:FoldStudy",
        "gemm": "shoal.cost.gemm.study:GemmStudy",
        "longctx": "shoal.plan.longctx_study:LongctxStudy",
        "mapping": "shoal.memory.mapping.mapping_study:MappingStudy",
        "memory": "shoal.memory.memory_study:MemoryStudy",
        "moe_overlap": "shoal.plan.experts.moe_overlap_study:MoeOverlapStudy",
        "pack": "shoal.kernel.strided.pack_study:PackStudy",
        "parscale": "shoal.cost.scaling.parscale_study:ParScaleStudy",
        "paths": "shoal.plan.paths.paths_study:PathsStudy",
        "peft": "shoal.train.peft.peft_study:PeftStudy",
        "price": "shoal.plan.price_study:PriceStudy",
        "planes": "shoal.kernel.planes.planes_study:PlanesStudy",
        "routes": "shoal.plan.routes.routes_study:RoutesStudy",
        "sbp": "shoal.parallel.placed.sbp_study:SbpStudy",
        "scaling": "shoal.cost.scaling.scaling_study:ScalingStudy",
        "schedule": "shoal.plan.schedules.schedule_study:ScheduleStudy",
        "stream": "shoal.kernel.algorithms.stream_study:StreamStudy",
        "stride": "shoal.plan.memory.stride_study:StrideStudy",
        "survival": "shoal.plan.memory.survival_study:SurvivalStudy",
        "swap": "shoal.plan.memory.swap_study:SwapStudy",
        "sync": "shoal.plan.sync_study:SyncStudy",
        "t3": "shoal.cost.t3.study:T3Study",
        "tiles": "shoal.plan.constrint.tiles_study:TilesStudy",
        "topology": "shoal.plan.topology.topology_study:TopologyStudy",
        "tune": "shoal.plan.tune.tune_study:TuneStudy",
    },
    about=(
        "A calculation about a technique, without running a job. Chosen by the word after "
        "`shoal explain`."
    ),
    protocol="shoal.ir.explanation:Study",
)

CLAIMS = PartTable(
    "claim",
    {
        "deep_optimizer_states": (
            "shoal.claims.experiments.deep_optimizer_states:DeepOptimizerStatesClaim"
        ),
        "dinfer": "shoal.claims.experiments.dinfer:DInfer",
        "dovetail": "shoal.claims.experiments.dovetail:DovetailClaim",
        "easyspec": "shoal.claims.experiments.easyspec:EasySpecClaim",
        "dissect": "shoal.claims.experiments.dissect:Dissect",
        "distserve": "shoal.claims.experiments.distserve:DistServe",
        "oneflow": "shoal.claims.experiments.oneflow:OneFlow",
        "ladder": "shoal.claims.experiments.ladder:LadderClaim",
        "parscale": "shoal.claims.experiments.parscale:ParScaleClaim",
        "duo_llm": "shoal.claims.experiments.duo_llm:DuoLLM",
        "lca_bench": "shoal.claims.experiments.lca_bench:LCABench",
        "gemm_forest": "shoal.claims.experiments.gemm_forest:GemmForest",
        "energon_ai": "shoal.claims.experiments.energon_ai:EnergonAI",
        "flash_rnn": "shoal.claims.experiments.flash_rnn:FlashRNN",
        "frontier": "shoal.claims.experiments.frontier:FrontierRecipe",
        "inmemory_ft": "shoal.claims.experiments.inmemory_ft:InMemoryFT",
        "infinite_llm": "shoal.claims.experiments.infinite_llm:InfiniteLLM",
        "learning_curves": "shoal.claims.experiments.learning_curves:LearningCurves",
        "fuyou": "shoal.claims.experiments.fuyou:FuyouClaim",
        "fasterpam": "shoal.claims.experiments.fasterpam:FasterPAMClaim",
        "fsmoe": "shoal.claims.experiments.fsmoe:FsmoeClaim",
        "galvatron": "shoal.claims.experiments.galvatron:GalvatronClaim",
        "marlin": "shoal.claims.experiments.marlin:MarlinClaim",
        "medusa": "shoal.claims.experiments.medusa:MedusaClaim",
        "hecate": "shoal.claims.experiments.hecate:HecateClaim",
        "moe_folding": "shoal.claims.experiments.moe_folding:MoeFoldingClaim",
        "megatron": "shoal.claims.experiments.megatron:MegatronClaim",
        "gpipe": "shoal.claims.experiments.gpipe:GPipeClaim",
        "sequence_parallel": "shoal.claims.experiments.sequence_parallel:SequenceParallel",
        "t3": "shoal.claims.experiments.t3:T3",
        "universal_checkpoint": (
            "shoal.claims.experiments.universal_checkpoint:UniversalCheckpointClaim"
        ),
        "vocab_parallel": "shoal.claims.experiments.vocab_parallel:VocabParallel",
        "tokenring": "shoal.claims.experiments.tokenring:TokenRingClaim",
        "single_path": "shoal.claims.experiments.single_path:SinglePath",
        "bytecheckpoint": "shoal.claims.experiments.bytecheckpoint:ByteCheckpointClaim",
        "c4": "shoal.claims.experiments.c4:C4",
        "bytescale": "shoal.claims.experiments.bytescale:ByteScaleClaim",
        "flexsp": "shoal.claims.experiments.flexsp:FlexSPClaim",
        "co2": "shoal.claims.experiments.co2:CO2Claim",
        "holmes": "shoal.claims.experiments.holmes:HolmesClaim",
        "topo3": "shoal.claims.experiments.topo3:Topo3Claim",
        "datastates": "shoal.claims.experiments.datastates:DataStatesClaim",
        "megascale": "shoal.claims.experiments.megascale:MegaScaleClaim",
        "redco": "shoal.claims.experiments.redco:RedcoClaim",
        "skippipe": "shoal.claims.experiments.skippipe:SkipPipeClaim",
        "tilus": "shoal.claims.experiments.tilus:Tilus",
        "tempi": "shoal.claims.experiments.tempi:Tempi",
        "bipolar_int": "shoal.claims.experiments.bipolar_int:BipolarIntClaim",
        "zero_infinity": "shoal.claims.experiments.zero_infinity:ZeroInfinityClaim",
        "falcon": "shoal.claims.experiments.falcon:FalconClaim",
        "ppd": "shoal.claims.experiments.ppd:PpdClaim",
        "smash": "shoal.claims.experiments.smash:Smash",
        "ssdtrain": "shoal.claims.experiments.ssdtrain:SSDTrainClaim",
        "superpipeline": "shoal.claims.experiments.superpipeline:SuperpipelineClaim",
        "parallel_algorithms": "shoal.claims.experiments.parallel_algorithms:ParallelAlgorithms",
        "fastswitch": "shoal.claims.experiments.fastswitch:FastSwitch",
        "ksort": "shoal.claims.experiments.ksort:KSort",
        "hogwild": "shoal.claims.experiments.hogwild:HogwildClaim",
        "longctx": "shoal.claims.experiments.longctx:LongCtx",
        "flover": "shoal.claims.experiments.flover:Flover",
        "malloc_game": "shoal.claims.experiments.malloc_game:MallocGameClaim",
        "peft": "shoal.claims.experiments.peft:PeftClaim",
        "tune_serving": "shoal.claims.experiments.tune_serving:TuneServing",
    },
    about="An experiment that judges a paper's claim on this machine. Run by `shoal claims run`.",
    protocol="shoal.claims.protocols:Experiment",
)
