"""Hypothesis without deadlines: on a busy machine a slow example says nothing about the code."""

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
