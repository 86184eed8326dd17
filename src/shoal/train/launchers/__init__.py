"""Launch files that start a plan on other machines."""
