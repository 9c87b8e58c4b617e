"""Views of images: parameters are drawn once, then applied by a back end."""

from mose_fast.augment.views import RECIPES, ViewInputs, ViewMaker, choose_feed

__all__ = ["RECIPES", "ViewInputs", "ViewMaker", "choose_feed"]
