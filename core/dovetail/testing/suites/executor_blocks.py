"""`ExecutorBlocks`: the checks of block tables, blocks that others wrote, and copies."""

from dovetail.testing.checks import check
from dovetail.testing.suites.executor_subject import ExecutorSubject, require_same


class ExecutorBlocks(ExecutorSubject):
    """Blocks that are appended, shared and copied."""

    @check("executor.new_blocks", since="1.0")
    def test_blocks_are_appended_in_order(self) -> None:
        """Requests with growing tables generated other tokens. Append `new_pages` (group, row,
        page) to the tables of their rows and groups, in order, for any order of rows; another
        request with these blocks, in this order, must find the computed values there."""
        with self._shared_bench() as bench:
            size = bench.block_size
            lengths = {"a": 1, "c": size}
            expected = {
                name: bench.alone(name, bench.prompt(length + 2 * size), 3)
                for name, length in lengths.items()
            }
            for name, length in lengths.items():
                bench.add(name, bench.prompt(length + 2 * size), blocks=bench.take_blocks(1))
            bench.run({"a": 1, "c": size})
            bench.grow("cacaca")
            bench.prefill("a")  # c gets its blocks in a step in which it has no part
            bench.prefill("c")
            bench.decode("a", "c")
            for name in lengths:
                request = bench.requests[name]
                require_same(bench, name, expected[name], "its blocks appended c, a, c, a, …")
                bench.add(
                    "next",
                    request.tokens,
                    prompt_len=request.prompt_len,
                    computed=request.computed,
                    blocks=request.blocks,
                    seed=request.sampling.seed,
                )
                bench.prefill("next")
                require_same(
                    bench,
                    "next",
                    expected[name][2:],
                    "on the blocks of another, which were appended to its table",
                )

    @check("executor.cached", since="1.0")
    def test_a_row_may_begin_on_blocks_that_others_wrote(self) -> None:
        """A request started with `computed` tokens in blocks written by another, before or in the
        same step, and generated other tokens than by itself. `computed` tokens need no work; write
        the K and V of the whole batch before any row attends."""
        with self._shared_bench() as bench:
            shared = 2 * bench.block_size
            prompt = bench.prompt(shared + 3)
            expected = bench.alone("a", prompt, 3)
            first = bench.add("first", bench.prompt(shared))
            for when, counts in (
                ("in the same step", {"a": 3, "first": shared}),
                ("before", {"a": 3}),
            ):
                bench.add(
                    "a",
                    prompt,
                    computed=shared,
                    blocks=[*first.blocks[:2], *bench.take_blocks(-(-11 // bench.block_size))],
                )
                bench.run(counts)
                bench.decode("a", steps=2)
                require_same(bench, "a", expected, f"on blocks that another wrote {when}")
                del bench.requests["a"].blocks[:2]  # they are still the other's
                bench.remove("a")

    @check("executor.shared_prefix", since="1.0", capability="shared_prefix")
    def test_a_shared_prefix_changes_no_token(self) -> None:
        """The executor declares `Capacity.shared_prefix`, and requests with
        `Batch.shared_prefix_blocks` generated other tokens than by themselves. Exactly these blocks
        may be read once for all rows of the batch."""
        with self._shared_bench() as bench:
            shared = 2 * bench.block_size
            prompts = {
                name: bench.prompt(shared) + bench.prompt(3 + variant, variant)
                for variant, name in enumerate("abc")
            }
            expected = {name: bench.alone(name, prompt, 4) for name, prompt in prompts.items()}
            first = bench.add("first", bench.prompt(shared))
            bench.prefill("first")
            for name, prompt in prompts.items():
                own = bench.take_blocks(-(-(len(prompt) + 4 - shared) // bench.block_size))
                bench.add(name, prompt, computed=shared, blocks=[*first.blocks[:2], *own])
            bench.run({name: len(prompt) - shared for name, prompt in prompts.items()}, shared=2)
            for names in ("abc", "cab", "cb"):
                bench.run(dict.fromkeys(names, 1), shared=2)
            for name in prompts:
                require_same(bench, name, expected[name], "with two blocks shared by all rows")

    @check("executor.copies", since="1.0")
    def test_copies_run_in_order_and_before_the_step_writes(self) -> None:
        """A request started on copies of another's blocks and generated other tokens than by
        itself. Run copies in order (one may read what the previous one wrote), after the rows'
        changes and before the step's writes, since a source may then belong to another request."""
        with self._shared_bench() as bench:
            length = bench.block_size + bench.block_size // 2 + 1
            prompt = bench.prompt(length)
            expected = bench.alone("a", prompt, 3)
            other = bench.alone("other", bench.prompt(length, variant=1), 1)
            source = bench.add("source", prompt, room=0)
            bench.prefill("source")
            room = -(-(length + 8) // bench.block_size)
            middle = bench.take_blocks(len(source.blocks))
            table = bench.take_blocks(room)
            second = bench.take_blocks(room)
            bench.remove("source")
            bench.add("other", bench.prompt(length, variant=1), blocks=source.blocks)
            bench.add("a", prompt, computed=length - 1, blocks=table)
            bench.add(
                "twin",
                prompt,
                computed=length - 1,
                blocks=second,
                seed=bench.requests["a"].sampling.seed,
            )
            pairs = [
                *zip(source.blocks, middle, strict=True),
                *zip(middle, table, strict=False),
                *zip(source.blocks, second, strict=False),
            ]
            copies = [copy for src, dst in pairs for copy in bench.copies(src, dst)]
            bench.run({"other": length, "a": 1, "twin": 1}, copies=copies)
            require_same(
                bench, "other", other, "in blocks that were copied before it wrote to them"
            )
            bench.decode("a", "twin", steps=2)
            require_same(
                bench,
                "a",
                expected,
                "on copies of copies of another's blocks, which a third wrote to in the same step",
            )
            require_same(bench, "twin", expected, "on second copies of another's blocks")
