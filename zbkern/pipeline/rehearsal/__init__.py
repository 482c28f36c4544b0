"""Rehearsing a plan: every rank of a pipeline alone, one after the other on one device, joined to a step."""
