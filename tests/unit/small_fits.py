"""Settings of fits that take a second."""

from __future__ import annotations

from kernelcast_lab.fit.recipes import Settings, Training


def training(*hidden: int, epochs: int) -> Training:
    return Training(
        hidden=hidden,
        epochs=epochs,
        batch=128,
        learning_rate=3e-3,
        weight_decay=1e-4,
        gpu_dropout=0.3,
        word_dropout=0.1,
        noise=0.0,
    )


def small_settings(*, epochs: int, transfer_epochs: int, rows_left_out: int) -> Settings:
    small = training(16, epochs=transfer_epochs)
    return Settings(
        networks=1,
        transfer_networks=1,
        main=training(32, 32, epochs=epochs),
        transfer=small,
        ceiling=small,
        rows_left_out=rows_left_out,
        least_share=0.08,
        most_repeats=20,
    )
