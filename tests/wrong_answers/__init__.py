"""Plausible wrong answers, one module a lab; each has a table ``WRONG``: exercise -> answers."""
