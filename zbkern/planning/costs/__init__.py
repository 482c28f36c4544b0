"""Costs: what passes take and hold, as users say it by chunk or by layer, and what a rank then holds."""
