"""attacks: what malicious clients send, to test the rules that withstand them."""

from shoal.core.parts import PartTable

__all__ = ["ATTACKS"]

ATTACKS = PartTable(
    "attack",
    {
        "sign_flip": "shoal.fields.federate.attacks.sign_flip:SignFlip",
        "random": "shoal.fields.federate.attacks.random:RandomUpdate",
        "gaussian": "shoal.fields.federate.attacks.gaussian:GaussianNoise",
        "scaled": "shoal.fields.federate.attacks.scaled:Scaled",
        "drop": "shoal.fields.federate.attacks.drop:DropCoordinates",
        "fall_of_empires": "shoal.fields.federate.attacks.fall_of_empires:FallOfEmpires",
        "little_is_enough": "shoal.fields.federate.attacks.little_is_enough:LittleIsEnough",
        "label_flip": "shoal.fields.federate.attacks.label_flip:LabelFlip",
    },
    about=(
        "What malicious clients of a test send. Chosen by the key `attack` of a federated job; "
        "`attackers` says how many clients do."
    ),
    protocol="shoal.fields.federate.attacks.protocols:Attack",
)
