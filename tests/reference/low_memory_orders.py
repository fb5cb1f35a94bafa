"""The order that draws forward what frees memory, with sets and copies instead of undoing."""

from collections import Counter

from pardnn.graph.csr import RESIDUAL, GraphArrays


def eager_free_order(a: GraphArrays, base: list[int], tiny: int, most: int) -> list[int]:
    """Return all ops: first what was seen to free what it takes, by its place in `base`.

    Args:
        a: The graph.
        base: Positions in another order, by which ops come else.
        tiny: Bytes that count as nothing.
        most: Ops that are followed from one that takes memory.
    """
    n, owner_of = a.num_ops, a.tensor_owner.tolist()
    reads = [a.input_tensor[a.input_ptr[i] : a.input_ptr[i + 1]].tolist() for i in range(n)]
    makes = [range(a.output_ptr[i], a.output_ptr[i + 1]) for i in range(n)]
    before = [a.after_op[a.after_ptr[i] : a.after_ptr[i + 1]].tolist() for i in range(n)]
    readers = [[i for i in range(n) for r in reads[i] if r == t] for t in range(a.num_tensors)]
    after = [
        [x for t in makes[i] for x in readers[t]] + [x for x in range(n) if i in before[x]]
        for i in range(n)
    ]

    def is_kept(t: int) -> bool:
        return bool(a.memory[a.tensor_op[t]] == RESIDUAL)

    def is_ready(op: int, ran: set[int]) -> bool:
        return {int(a.tensor_op[t]) for t in reads[op]} | set(before[op]) <= ran

    def net(op: int, left: Counter[int]) -> int:
        takes = sum(
            int(a.tensor_bytes[t]) for t in makes[op] if a.tensor_alias[t] < 0 and not is_kept(t)
        )
        freed = [owner_of[t] for t in reads[op] if left[owner_of[t]] == 1]
        return takes - sum(int(a.tensor_bytes[t]) for t in freed if not is_kept(t))

    def gives_back(op: int, ran: set[int], left: Counter[int]) -> bool:
        ran, left, total, steps = set(ran), Counter(left), net(op, left), 0
        while total > tiny and steps < most:
            ran.add(op)
            left.subtract(owner_of[t] for t in reads[op])
            steps += 1
            ready = [x for x in after[op] if is_ready(x, ran)]
            if not ready:
                break
            op = min(ready, key=lambda x: net(x, left))
            total += net(op, left)
        return total <= tiny

    left = Counter(owner_of[t] for row in reads for t in row)
    ran, freeing, order = set[int](), set[int](), list[int]()
    while len(order) < n:
        ready = [op for op in range(n) if op not in ran and is_ready(op, ran)]
        op = min((freeing - ran) or ready, key=lambda x: base[x])
        earlier = set(ran)
        ran.add(op)
        order.append(op)
        for t in reads[op]:
            left[owner_of[t]] -= 1
            if left[owner_of[t]] == 1:
                waiting = [x for x in readers[t] if x not in ran and is_ready(x, earlier)]
                freeing |= {x for x in waiting if gives_back(x, earlier | {op}, left)}
        freeing |= {x for x in after[op] if is_ready(x, ran) and gives_back(x, ran, left)}
    return order
