"""What a GPU costs by the hour: list prices with their date and source, one file."""

from kernelcast.prices.price import KINDS, SHIPPED, Price, read_prices

__all__ = ["KINDS", "SHIPPED", "Price", "read_prices"]
