"""The one name of NKI's language that the package reads."""

bfloat16 = "bfloat16"
