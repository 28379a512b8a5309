"""The paper's tables and figures as data, and the grids of runs behind them.

    finessl paper                       what there is, and what each needs
    finessl paper main --only cifar100  run it, and print it next to the paper's values

settings.toml and tables/*.toml hold the numbers and the settings. `contents` reads them, `grid` makes a grid of runs from a
table, `needs` finds missing data and weights, `report` compares our results with the paper's.
"""
