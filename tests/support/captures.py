"""Capture the products of small models that tests define."""

from __future__ import annotations

from sweeps.capture.capture import capture
from sweeps.capture.captured import Product
from sweeps.capture.sources import find_source
from sweeps.capture.step import ModelStep

STEP = ModelStep(batch=2, seq=128)
SMALL = {"hidden": 256, "heads": 4, "layers": 5, "vocab": 1003}


def products_of(module: str, factory: str, *inputs: str, step: ModelStep = STEP) -> list[Product]:
    """Return the products of the model that ``module:factory`` makes."""
    return list(capture(find_source(f"{module}:{factory}", inputs=inputs), step).products)


def forward(products: tuple[Product, ...]) -> list[Product]:
    return [product for product in products if product.pass_ == "forward"]
