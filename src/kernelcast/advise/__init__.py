"""Advice: what to change so that GPU work gets faster, and what that would be worth."""
