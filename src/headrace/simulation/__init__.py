"""IMITATES links and stages in virtual time."""
