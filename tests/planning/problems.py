"""Problems for tests of planners: a chain, and random graphs from hypothesis."""

import numpy as np
from hypothesis import strategies as st

from memory_saving_gradients.planning.problem import Op, Problem, Tensor


def chain(length: int, size: int = 8) -> Problem:
    """Forward f0..f(n-1), backward b(n-1)..b0; each backward op reads f's output and b's before."""
    tensors = [Tensor(f"f{i}:0", size) for i in range(length)]
    ops = [Op(f"f{i}", (i - 1,) if i else (), (i,)) for i in range(length)]
    for i in reversed(range(length)):
        gradient = len(tensors)
        tensors.append(Tensor(f"b{i}:0", size))
        before = (gradient - 1,) if i < length - 1 else ()
        ops.append(Op(f"b{i}", (i, *before), (gradient,), backward=True))
    return Problem(tuple(ops), tuple(tensors), frozenset({len(tensors) - 1}))


@st.composite
def problems(draw, most_forward: int = 12) -> Problem:
    """Random steps: skips, several outputs, pinned ops, tiny and huge tensors, workspace."""
    sizes = st.sampled_from([0, 1, 5, 8, 8, 8, 100])
    tensors: list[Tensor] = []
    ops: list[Op] = []

    def add(name: str, inputs, outputs: int, **kinds) -> tuple[int, ...]:
        made = tuple(range(len(tensors), len(tensors) + outputs))
        tensors.extend(Tensor(f"{name}:{k}", draw(sizes)) for k in range(outputs))
        ops.append(
            Op(
                name,
                tuple(dict.fromkeys(inputs)),
                made,
                cost=draw(st.integers(1, 9)),
                reused=draw(st.sampled_from([0.0, 0.0, 0.5])),
                workspace=draw(st.sampled_from([0, 0, 4])),
                in_place=draw(st.booleans()),
                overwritable=draw(st.booleans()),
                freed_first=tuple(inputs[:1]) if draw(st.booleans()) else (),
                **kinds,
            )
        )
        return made

    forward = draw(st.integers(1, most_forward))
    for i in range(forward):
        some = st.lists(st.integers(0, len(tensors) - 1), max_size=3) if tensors else st.just([])
        pinned = draw(st.integers(0, 5)) == 0
        expensive = draw(st.booleans())
        outputs = draw(st.integers(1, 2))
        add(f"f{i}", draw(some), outputs, pinned=pinned, expensive=expensive)
    activations = len(tensors)
    gradient: tuple[int, ...] = ()
    for i in reversed(range(forward)):
        read = draw(st.lists(st.integers(0, activations - 1), max_size=2))
        last = [*ops[i].outputs, *read, *gradient[:1]]
        gradient = add(f"b{i}", last, 1, backward=True)
    barriers = draw(st.booleans())
    return Problem(tuple(ops), tuple(tensors), frozenset(gradient), barriers=barriers)


def layered(count: int, seed: int) -> Problem:
    """A wide, dense step, like those of searched architectures.

    Layers of random width; every op reads up to four tensors of the ten layers before, and its
    backward op reads those, its output and the gradients of its readers.

    Args:
        count: the forward ops.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    layers: list[list[int]] = []
    inputs: list[list[int]] = []
    while len(inputs) < count:
        before = [t for layer in layers[-10:] for t in layer]
        width = min(int(rng.integers(1, 9)), count - len(inputs))
        layers.append(list(range(len(inputs), len(inputs) + width)))
        for _ in range(width):
            some = rng.choice(before, min(len(before), int(rng.integers(1, 5)))) if before else []
            inputs.append(sorted(set(map(int, some))))
    sizes = (10 ** rng.uniform(1, 3, count)).astype(int).tolist()
    costs = (10 ** rng.uniform(-1, 1, 2 * count)).tolist()
    ops = [Op(f"f{i}", tuple(inputs[i]), (i,), costs[i]) for i in range(count)]
    tensors = [Tensor(f"f{i}:0", size) for i, size in enumerate(sizes)]
    gradients: list[list[int]] = [[] for _ in range(count)]
    results = []
    for i in reversed(range(count)):
        made = []
        for t in inputs[i]:
            gradients[t].append(len(tensors))
            made.append(len(tensors))
            tensors.append(Tensor(f"b{i}:{t}", sizes[t]))
        read = (*inputs[i], i, *gradients[i])
        if not made:
            made = [len(tensors)]
            tensors.append(Tensor(f"b{i}", 1))
            results += made
        ops.append(Op(f"b{i}", read, tuple(made), costs[count + i], backward=True))
    return Problem(tuple(ops), tuple(tensors), frozenset(results))
