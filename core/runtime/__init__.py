"""Executes: who is resident, one MoE layer, what was measured."""
