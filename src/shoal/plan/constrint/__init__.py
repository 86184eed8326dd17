"""plan.constrint: systems of constraints over integers, and the tiles that follow from them."""
