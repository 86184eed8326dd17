"""learn: what clients learn from, who has what, and the models that they train."""

from shoal.core.parts import PartTable

__all__ = ["EXAMPLE_SOURCES", "LEARNERS", "PARTITIONERS"]

EXAMPLE_SOURCES = PartTable(
    "example_source",
    {
        "digits": "shoal.fields.federate.learn.sources:Digits",
        "breast_cancer": "shoal.fields.federate.learn.sources:BreastCancer",
        "wine": "shoal.fields.federate.learn.sources:Wine",
        "regression": "shoal.fields.federate.learn.least_squares:Regression",
        "text": "shoal.fields.federate.learn.texts:PackageTexts",
        "file": "shoal.fields.federate.learn.files:TableFile",
    },
    about="What clients learn from. Chosen by the key `data` of a job with `job: federate`.",
    protocol="shoal.fields.federate.learn.protocols:ExampleSource",
)

PARTITIONERS = PartTable(
    "partitioner",
    {
        "iid": "shoal.fields.federate.learn.partitions:Iid",
        "class_k": "shoal.fields.federate.learn.partitions:ClassK",
        "dirichlet": "shoal.fields.federate.learn.partitions:Dirichlet",
        "dual_dirichlet": "shoal.fields.federate.learn.partitions:DualDirichlet",
        "natural": "shoal.fields.federate.learn.partitions:Natural",
    },
    about="Which client has which examples. Chosen by the key `partition` of a federated job.",
    protocol="shoal.fields.federate.learn.protocols:Partitioner",
)

LEARNERS = PartTable(
    "learner",
    {
        "logistic": "shoal.fields.federate.learn.networks:Logistic",
        "mlp": "shoal.fields.federate.learn.networks:MlpLearner",
        "cnn_digits": "shoal.fields.federate.learn.networks:CnnDigits",
        "least_squares": "shoal.fields.federate.learn.least_squares:LeastSquares",
        "module": "shoal.fields.federate.learn.modules:Module",
        "linear": "shoal.fields.federate.learn.linear:SgdLinear",
        "tiny_lm": "shoal.fields.federate.learn.language_models:TinyLm",
        "lora": "shoal.fields.federate.learn.language_models:LoraAdapters",
    },
    about="The model that clients train. Chosen by the key `learner` of a federated job.",
    protocol="shoal.fields.federate.learn.protocols:Learner",
)
