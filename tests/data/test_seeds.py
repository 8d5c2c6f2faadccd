from itertools import product

from miles.data.seeds import sample_seed


def test_seeds_are_stable_distinct_and_63_bits():
    assert sample_seed(0, 0, 0) == 383113283702498109
    assert sample_seed(7, 1234, 5, 2, 1) == 7671969522168689748
    seeds = [sample_seed(*key) for key in product(range(3), range(50), range(4), range(3), range(3))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    assert sample_seed(2**70, 10**12, 5, 1, 2) == sample_seed(2**70, 10**12, 5, 1, 2)
