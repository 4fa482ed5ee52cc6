"""Compare a job without a cache, with its framework's own cache, and with graphstash.

Each arm runs cold and, later in the same round, warm. Figures belong to one arm. Ratios compare two
arms of one round, so that other load on the machine affects both.
"""

from benchmarks.figures import rotated

BARE = "no cache"
COLD, SAME_HOST, OTHER_HOST = (
    f"graphstash, {each}" for each in ("cold", "warm, same host", "warm, other host")
)


class Caches:
    """The six arms.

    Args:
        bench: the part that compares them.
        own: name of the framework's own cache.
        columns: field of a job's result by column of the tables.
        ratios: columns whose ratios are shown.
    """

    count = 6

    def __init__(self, bench, own, columns, ratios):
        self._bench, self._columns, self._ratios = bench, columns, ratios
        own_cold, own_warm = f"{own}, cold", f"{own}, warm"
        self._cold = {BARE: "", own_cold: "own", COLD: "graphstash"}
        self._warm = {own_warm: "own", SAME_HOST: "graphstash", OTHER_HOST: "graphstash"}
        self._pairs = [(SAME_HOST, own_warm), (OTHER_HOST, own_warm), (OTHER_HOST, COLD)]
        self._pairs += [(OTHER_HOST, BARE), (own_cold, BARE), (COLD, own_cold), (COLD, BARE)]

    def compare(self, number, title, run):
        """Run a job six times.

        Args:
            number: number of the round.
            title: title of the job.
            run: takes the name of a host and "", "own" or "graphstash"; returns the job's figures,
                and its `losses` and `fallbacks` if it has any.
        """
        figures, results = self._bench.figures, {}
        arms = self._cold | self._warm
        for arm in (*rotated(self._cold, number), *rotated(self._warm, number)):
            self._bench.now(f"{title}: {arm}")
            results[arm] = run("other" if arm == OTHER_HOST else "host", arms[arm])
        for arm in arms:
            for column, field in self._columns.items():
                figures.add(title, arm, column, results[arm][field])
            if results[arm].get("losses") != results[BARE].get("losses"):
                figures.note(f"LOSSES DIFFER: {title}, {arm}")
            if fallbacks := results[arm].get("fallbacks"):
                figures.note(f"fallbacks in {title}, {arm}: {fallbacks}")
        for first, second in self._pairs:
            for column in self._ratios:
                field = self._columns[column]
                ratio = results[first][field] / results[second][field]
                figures.add("ratios within a round", f"{title}: {first} / {second}", column, ratio)
