"""BM25, which ranks texts by the words that they share with a query.

    index = BM25(["the cat sat", "the dog"])
    index.search("a cat", 5)          # [(0, 0.72…)]: the place of each text, and its score, best first

    score(q, d) = Σ over the different words t of q:  idf(t) · tf·(k1 + 1) / (tf + k1·(1 − b + b·|d| / mean |d|))
    idf(t) = ln(1 + (N − n + 0.5) / (n + 0.5))        N texts, n of them with t, tf times in d, |d| words in d

(Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009; with the idf of Lucene, which is never negative.) Words are
runs of letters and digits without regard to case; nothing is stemmed and no word is left out. The scores of single words are
computed once, so a query costs as much as its words have entries.
"""

from __future__ import annotations

import heapq
import math
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable

K1, B = 1.2, 0.75
MOST_WORDS = 64  # of a query
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text, in order."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class BM25:
    """An index of texts. It does not change, so any number of threads may search it."""

    def __init__(self, texts: Iterable[str], *, k1: float = K1, b: float = B) -> None:
        """Raises ValueError for k1 below 0 and for b outside 0 to 1."""
        if k1 < 0 or not 0 <= b <= 1:
            raise ValueError(f"k1={k1} must be at least 0 and b={b} from 0 to 1")
        lengths: list[int] = []
        times: dict[str, tuple[array[int], array[float]]] = {}
        for place, text in enumerate(texts):
            counts = Counter(words(text))
            lengths.append(counts.total())
            for word, count in counts.items():
                places, values = times.setdefault(word, (array("L"), array("d")))
                places.append(place)
                values.append(count)
        self.size = len(lengths)
        mean = sum(lengths) / self.size if self.size else 0.0
        damping = [k1 * (1 - b + b * (length / mean if mean else 0.0)) for length in lengths]
        for places, values in times.values():
            idf = math.log(1 + (self.size - len(places) + 0.5) / (len(places) + 0.5))
            for n, place in enumerate(places):
                values[n] = idf * values[n] * (k1 + 1) / (values[n] + damping[place])
        self._scores = times

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """At most `k` texts that share a word with the query, best first; of equal ones the earlier."""
        total: dict[int, float] = {}
        for word in list(dict.fromkeys(words(query)))[:MOST_WORDS]:
            places, values = self._scores.get(word, ((), ()))
            for place, value in zip(places, values, strict=True):
                total[place] = total.get(place, 0.0) + value
        return heapq.nsmallest(k, total.items(), key=lambda found: (-found[1], found[0]))
