"""What a run is: every choice that decides its result, checked completely before anything starts. See schema.py."""

from finessl.recipe.files import find_recipe, parse_setting, read_toml, recipe_folder
from finessl.recipe.merge import merge, override
from finessl.recipe.schema import DataRecipe, ModelRecipe, Recipe, TrainRecipe
from finessl.registry.options import Choice

__all__ = [
    "Choice", "DataRecipe", "ModelRecipe", "Recipe", "TrainRecipe", "find_recipe", "merge", "override", "parse_setting",
    "read_toml", "recipe_folder",
]  # fmt: skip
