"""An independent, naive replay of schedules. Shares no code with the simulator."""

from memory_saving_gradients.planning.problem import Problem


def replay(problem: Problem, schedule) -> int:
    """Runs a schedule step by step with reference counts; returns the peak, checks the rules."""
    produced = {t for op in problem.ops for t in op.outputs}
    forward = {t for op in problem.ops if not op.backward for t in op.outputs}
    fixed = {t for op in problem.ops if not op.overwritable for t in op.outputs}
    seen_before: dict[int, int] = {}
    for index in schedule:
        op = problem.ops[index]
        seen_before[index] = seen_before.get(index, 0) + 1
        if op.pinned or op.backward:
            assert seen_before[index] == 1, f"{op.name} must not run twice"
    for index, op in enumerate(problem.ops):
        if op.backward:
            assert seen_before.get(index) == 1, f"{op.name} never ran"

    # A copy is (tensor, run). Which runs read which copy?
    newest: dict[int, int] = {}
    readers: dict[tuple[int, int], set[int]] = {}
    for run, index in enumerate(schedule):
        for tensor in problem.ops[index].inputs:
            if tensor in produced:
                assert tensor in newest, f"{problem.tensors[tensor].name} read before made"
                readers[tensor, newest[tensor]].add(run)
        for tensor in problem.ops[index].outputs:
            newest[tensor] = run
            readers[tensor, run] = set()
    for result in problem.results:
        assert result in newest, f"result {result} never made"
        readers[result, newest[result]].add(len(schedule))

    held: set[tuple[int, int]] = set()
    peak = 0
    for run, index in enumerate(schedule):
        op = problem.ops[index]
        inputs = [copy for copy in held if run in readers[copy] and copy[0] in op.inputs]
        assert {t for t, _ in inputs} == {t for t in op.inputs if t in produced}
        fresh = [(tensor, run) for tensor in op.outputs]
        total = sum(problem.tensors[t].bytes for t, _ in [*held, *fresh]) + op.workspace
        sizes = {problem.tensors[t].bytes for t in op.outputs}
        behind = forward if problem.barriers and op.backward else set()
        over = set(op.freed_first)
        if op.in_place:
            over |= set(op.inputs) - behind - fixed
        last = [t for t, r in inputs if t in over and max(readers[t, r]) == run]
        lent = [problem.tensors[t].bytes for t in last]
        total -= max((size for size in lent if size in sizes), default=0)
        peak = max(peak, total)
        held.update(fresh)
        held = {copy for copy in held if any(reader > run for reader in readers[copy])}
    return peak
