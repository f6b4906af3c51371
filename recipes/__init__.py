"""Recipes that ship with strop (*.yaml)."""
