"""Strategies and masks of later papers, predicted before they ran."""
