//! Tests of operations of no elements, and of buffers that overlap or do not fit.

use devcomm::{
    AllGatherGemm, Buffer, Collectives, CollectivesOptions, CommConfig, Communicator, DeviceSlice,
    Error, F8E4M3, Gemm, GemmAllReduce, GemmReduceScatter, GroupedGemm, Parts, Rank, ReduceOp,
    Result, RowGroups, Signal, Simulation, Stream, WaitSignalDesc, group,
};
use devcomm_testing::machines::{Gpus, on_gpus};
use half::bf16;

/// Calls every collective of the communicator and of `Collectives`. `slice` returns the buffers to
/// send and to receive for a number of elements; a rank's chunk has `n`. `result` gets the results.
fn each_collective(
    collectives: &Collectives,
    comm: &Communicator,
    [n, root]: [usize; 2],
    stream: &Stream,
    slice: impl Fn(usize) -> Result<[DeviceSlice<f32>; 2]>,
    mut result: impl FnMut(&'static str, Result<()>) -> Result<()>,
) -> Result<()> {
    let (sum, ranks) = (ReduceOp::Sum, comm.n_ranks());
    let ([send, recv], [sends, recvs]) = (slice(n)?, slice(n * ranks)?);
    let (recv_at_root, recvs_at_root) = (Some(recv.clone()), Some(recvs.clone()));
    let sent = Some(send.clone());
    let all_sent = Some(sends.clone());
    result("all_reduce", comm.all_reduce(&send, &recv, sum, stream))?;
    result("all_reduce", collectives.all_reduce(&send, &recv, sum, stream))?;
    result("all_gather", comm.all_gather(&send, &recvs, stream))?;
    result("all_gather", collectives.all_gather(&send, &recvs, stream))?;
    result("reduce_scatter", comm.reduce_scatter(&sends, &recv, sum, stream))?;
    result("reduce_scatter", collectives.reduce_scatter(&sends, &recv, sum, stream))?;
    result("all_to_all", comm.all_to_all(&sends, &recvs, stream))?;
    result("all_to_all", collectives.all_to_all(&sends, &recvs, stream))?;
    result("broadcast", comm.broadcast(sent.clone(), &recv, root, stream))?;
    result("broadcast", collectives.broadcast(sent, &recv, root, stream))?;
    result("reduce", comm.reduce(&send, recv_at_root, sum, root, stream))?;
    result("gather", comm.gather(&send, recvs_at_root, root, stream))?;
    result("scatter", comm.scatter(all_sent, &recv, root, stream))
}

/// Runs `f` on machines with and without load and store between the ranks, and in a world of one.
fn everywhere(name: &str, f: impl Fn(&Rank) -> Result<()> + Copy + Sync) {
    on_gpus(name, 2, f);
    Gpus::from(Simulation::new(4).team_size(2)).run(name, f);
    Gpus::from(Simulation::new(1)).run(name, f);
}

#[test]
fn no_elements_are_nothing_to_do_everywhere() {
    everywhere("no_elements_are_nothing_to_do_everywhere", |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (me, n, collectives) = (rank.rank(), rank.n_ranks(), Collectives::new(comm)?);
        let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
        let (x, y) = (comm.window::<f32>(16)?, comm.mem_alloc::<f32>(16)?);
        let own: Vec<f32> = (0..16).map(|i| (16 * me + i) as f32).collect();
        x.copy_from_host(&own)?;
        y.copy_from_host(&own)?;
        let (none, empty) = (x.slice(3..3)?, y.slice(16..)?);
        let mut done = 0;
        // The slices are of two buffers, and of one in place.
        for to in [&empty, &none] {
            let slice = |_| Ok([none.clone(), to.clone()]);
            each_collective(&collectives, comm, [0, 0], &stream, slice, |_, result| {
                done += 1;
                result
            })?;
            let zeros = vec![0; n];
            let parts = Parts { counts: &zeros, offsets: &zeros };
            collectives.all_to_all_v(&none, parts, to, parts, &stream)?;
            group(|_| {
                comm.send(&none, next, &stream)?;
                comm.recv(to, previous, &stream)
            })?;
        }
        // Two rounds of the calls of `each_collective`.
        assert_eq!(done, 2 * 13);
        // These rows belong to no token.
        let weight = comm.mem_alloc::<f32>(8)?;
        let (a, b) = (none_of(&x)?, none_of(&y)?);
        collectives.all_reduce_rmsnorm(&a, &b, &weight, &a, 0.1, &stream)?;
        let (bytes, scale) = (comm.mem_alloc::<F8E4M3>(16)?, comm.mem_alloc::<f32>(1)?);
        let output = (&bytes.slice(..0)?, &scale);
        collectives.all_reduce_rmsnorm_quantised(&a, &b, &weight, output, 0.1, &stream)?;
        // Copies, fills and puts.
        stream.copy(&none, &empty)?;
        stream.copy(&none, &none)?;
        stream.fill(&none, 7.0)?;
        stream.copy_to_device(&[], &none)?;
        stream.copy_to_host(&none, &mut [])?;
        none.copy_from_host(&[])?;
        none.copy_to_host(&mut [])?;
        none.fill_bytes(1)?;
        for at in [0, 16] {
            comm.put_signal(&none, &x, at, Signal::to(next), &stream)?;
            comm.wait_signal(&[WaitSignalDesc::from(previous)], &stream)?;
        }
        assert!(rank.all_gather::<f32>(&[])?.concat().is_empty());
        stream.synchronize()?;
        for memory in [x.device_slice(), y.device_slice()] {
            let mut left = vec![0.0; 16];
            memory.copy_to_host(&mut left)?;
            assert_eq!(left, own);
        }
        // Operations of other lengths still work.
        let slice = |n| Ok([x.slice(..n)?, y.slice(..n)?]);
        each_collective(&collectives, comm, [16 / n, 0], &stream, slice, |_, result| result)?;
        stream.synchronize()
    });
}

fn none_of(buffer: &impl Buffer<Element = f32>) -> Result<DeviceSlice<f32>> {
    buffer.slice(4..4)
}

fn refused(what: &str, result: Result<()>, reason: &str) {
    let Err(Error::InvalidInput { what: message }) = &result else { panic!("{what}: {result:?}") };
    assert!(message.contains(reason), "{what}: {message}");
}

#[test]
fn buffers_that_overlap_other_than_in_place_are_refused() {
    on_gpus("buffers_that_overlap_other_than_in_place_are_refused", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = Collectives::new(comm)?;
        let memory = comm.window::<f32>(4000)?;
        for (n, shift) in [(8, 1), (8, 4), (8, 15), (500, 4), (500, 499)] {
            for backwards in [false, true] {
                let slice = |n: usize| {
                    let slices = [
                        memory.slice(1000..1000 + n)?,
                        memory.slice(1000 + shift..1000 + shift + n)?,
                    ];
                    let [one, other] = slices;
                    Ok(if backwards { [other, one] } else { [one, other] })
                };
                // The buffers overlap: they are longer than the shift between them.
                let n = if n <= shift { 2 * n } else { n };
                each_collective(
                    &collectives,
                    comm,
                    [n, rank.rank()],
                    &stream,
                    slice,
                    |what, result| {
                        refused(what, result, "overlap");
                        Ok(())
                    },
                )?;
                let [one, other] = slice(n)?;
                refused("a copy", stream.copy(&one, &other), "overlap");
            }
        }
        // Operations in place are allowed.
        let (me, all) = (rank.rank(), memory.slice(..16)?);
        let own = memory.slice(8 * me..8 * (me + 1))?;
        comm.all_gather(&own, &all, &stream)?;
        collectives.all_gather(&own, &all, &stream)?;
        comm.reduce_scatter(&all, &own, ReduceOp::Sum, &stream)?;
        collectives.reduce_scatter(&all, &own, ReduceOp::Sum, &stream)?;
        comm.gather(&own, Some(all.clone()), 1, &stream)?;
        comm.scatter(Some(all), &own, 1, &stream)?;
        // These slices only touch.
        comm.all_reduce(&memory.slice(..8)?, &memory.slice(8..16)?, ReduceOp::Sum, &stream)?;
        stream.synchronize()
    });
}

#[test]
fn parts_and_rows_that_overlap_are_refused() {
    on_gpus("parts_and_rows_that_overlap_are_refused", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (collectives, x) = (Collectives::new(comm)?, comm.mem_alloc::<f32>(64)?);
        let parts = |offsets| Parts { counts: &[4, 4], offsets };
        let exchange = |sent, received| {
            collectives.all_to_all_v(&x, parts(sent), &x, parts(received), &stream)
        };
        let text = "parts to receive from ranks 0 and 1 in overlap";
        refused("all_to_all_v", exchange(&[0, 4], &[16, 19]), text);
        let text = "part to receive from rank 1 in overlaps that to send to rank 0";
        refused("all_to_all_v", exchange(&[0, 4], &[8, 3]), text);
        // Parts to send and to receive may alternate, and a part may be sent twice.
        exchange(&[0, 8], &[4, 12])?;
        exchange(&[0, 0], &[4, 12])?;
        let slice = |first: usize| x.slice(first..first + 8);
        let rows = |[input, residual, weight, output]: [usize; 4]| {
            let [input, residual] = [slice(input)?, slice(residual)?];
            let [weight, output] = [slice(weight)?, slice(output)?];
            collectives.all_reduce_rmsnorm(&input, &residual, &weight, &output, 0.1, &stream)
        };
        let overlapping =
            [[0, 4, 16, 24], [0, 8, 4, 24], [0, 8, 16, 4], [0, 8, 12, 24], [0, 8, 16, 12]];
        for at in overlapping.into_iter().chain([[0, 8, 16, 20]]) {
            refused("all_reduce_rmsnorm", rows(at), "overlap");
        }
        let f8 = comm.mem_alloc::<F8E4M3>(8)?;
        for at in [0, 8, 16] {
            let [input, residual, weight] = [slice(0)?, slice(8)?, slice(16)?];
            let to = (&f8, &x.slice(at..at + 1)?);
            let result = collectives
                .all_reduce_rmsnorm_quantised(&input, &residual, &weight, to, 0.1, &stream);
            refused("all_reduce_rmsnorm_quantised", result, "overlap");
        }
        rows([0, 8, 16, 24])?;
        // The output may be the input.
        rows([0, 8, 16, 0])?;
        stream.synchronize()
    });
}

/// The shape of products in one memory. A, B and C have at most 256 elements, at least 128.
const SHAPE: [usize; 3] = [16; 3];

/// Launches a product of A, B and C.
type Launch<'a> = &'a dyn Fn([&DeviceSlice<bf16>; 3]) -> Result<()>;

#[test]
fn factors_of_products_that_overlap_c_are_refused() {
    on_gpus("factors_of_products_that_overlap_c_are_refused", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (gemm, grouped) = (Gemm::new(&stream)?, GroupedGemm::new(&stream)?);
        let all_reduce = GemmAllReduce::new(comm, &stream, 16, 16)?;
        let reduce_scatter = GemmReduceScatter::new(comm, &stream, 16, 16)?;
        let all_gather = AllGatherGemm::new(comm, &stream, 16, 16)?;
        let words = || Ok::<_, Error>(comm.mem_alloc::<u32>(1)?.device_slice());
        let groups = RowGroups { offsets: words()?, sizes: words()? };
        let memory = comm.window::<bf16>(2048)?;
        let launches: [(&str, Launch<'_>); 5] = [
            ("Gemm", &|[a, b, c]| gemm.launch(a, b, c, SHAPE)),
            ("GroupedGemm", &|[a, b, c]| grouped.launch(a, b, c, &groups, SHAPE, None)),
            // C is at the beginning of the window.
            ("GemmAllReduce", &|[a, b, _]| all_reduce.launch(a, b, &memory, SHAPE)),
            ("GemmReduceScatter", &|[a, b, c]| reduce_scatter.launch(a, b, c, SHAPE)),
            ("AllGatherGemm", &|[a, b, c]| all_gather.launch(a, b, c, SHAPE)),
        ];
        let at = |first: usize| memory.slice(first..first + 256);
        let (c, apart) = (at(0)?, at(512)?);
        for (what, launch) in launches {
            for first in [0, 8, 120] {
                let other = at(first)?;
                refused(what, launch([&other, &apart, &c]), "A and C overlap");
                refused(what, launch([&apart, &other, &c]), "B and C overlap");
            }
            // These only touch. Elements that a product does not use may be anywhere.
            launch([&at(256)?, &apart, &c])?;
            launch([&memory.slice(256..)?, &memory.slice(512..)?, &memory.slice(..)?])?;
        }
        stream.synchronize()
    });
}

#[test]
fn what_is_added_to_a_product_may_only_be_c_as_a_whole() {
    on_gpus("what_is_added_to_a_product_may_only_be_c_as_a_whole", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (gemm, gather) = (Gemm::new(&stream)?, AllGatherGemm::new(comm, &stream, 16, 16)?);
        let (memory, factor) = (comm.mem_alloc::<bf16>(512)?, comm.mem_alloc::<bf16>(256)?);
        let (c, [f, other]) = (memory.slice(128..384)?, [&factor, &factor]);
        for first in [0, 8, 120, 136, 240] {
            let added = memory.slice(first..first + 256)?;
            let (bias, residual) = ("the bias and C overlap", "the residual and C overlap");
            let product = || gemm.product(SHAPE);
            let gathered = || gather.product(SHAPE);
            if first + 16 > 128 {
                refused("Gemm", product().bias(&added).launch(f, other, &c), bias);
                refused("AllGatherGemm", gathered().bias(&added).launch(f, other, &c), bias);
            }
            refused("Gemm", product().residual(&added).launch(f, other, &c), residual);
            refused("AllGatherGemm", gathered().residual(&added).launch(f, other, &c), residual);
        }
        gemm.product(SHAPE).residual(&c).launch(f, other, &c)?;
        gather.product(SHAPE).residual(&c).launch(f, other, &c)?;
        let (bytes, sums) = (comm.mem_alloc::<F8E4M3>(256)?, comm.mem_alloc::<f32>(256)?);
        let scales = [&sums.slice(255..)?, &comm.mem_alloc::<f32>(1)?.device_slice()];
        let scaled = gemm.product(SHAPE).scales(scales).launch(&bytes, &bytes, &sums);
        refused("Gemm", scaled, "the scale of A and C overlap");
        stream.synchronize()
    });
}

#[test]
fn exchanges_of_other_lengths_are_refused() {
    on_gpus("exchanges_of_other_lengths_are_refused", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = Collectives::new(comm)?;
        let (four, seven) = (comm.mem_alloc::<i64>(4)?, comm.mem_alloc::<i64>(7)?);
        let four_floats = comm.mem_alloc::<f32>(4)?;
        for (refused, reason) in [
            (collectives.all_gather(&four, &seven, &stream), "7 elements are not 2 times 4"),
            (
                collectives.all_to_all(&seven, &seven, &stream),
                "2 ranks, but its buffers have 7 elements",
            ),
            (
                collectives.reduce_scatter(&four_floats, &four_floats, ReduceOp::Sum, &stream),
                "4 elements are not 2 times 4",
            ),
            (collectives.broadcast(Some(four.device_slice()), &four, 2, &stream), "rank"),
        ] {
            let message = refused.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(message.contains(reason), "{message}");
        }
        Ok(())
    });
}

/// A `Collectives` treats a window of another communicator as other memory: kernels would take the
/// ranks of that one for its own.
#[test]
fn windows_of_another_communicator_are_as_other_memory() {
    on_gpus("windows_of_another_communicator_are_as_other_memory", 4, |rank| {
        let (world, stream, me) = (rank.communicator()?, rank.stream()?, rank.rank());
        let half = world.split(Some(me as i32 / 2), 0, &CommConfig::new())?.unwrap();
        let options = CollectivesOptions::new().lamport_bytes(512).push_blocks(2);
        let of_half = half.window::<f32>(4000)?;
        let of_world = world.window::<f32>(4000)?;
        stream.fill(&of_world, me as f32)?;
        rank.barrier()?;
        if me >= 2 {
            // Ranks 0 and 1 have no part in it.
            let own = of_world.slice(half.rank() * 2000..(half.rank() + 1) * 2000)?;
            let collectives = options.build(&half)?;
            collectives.all_gather(&own, &of_world, &stream)?;
            collectives.reduce_scatter(&of_world, &own, ReduceOp::Sum, &stream)?;
        }
        stream.synchronize()?;
        rank.barrier()?;
        let mut all = [0.0; 4000];
        stream.copy_to_host(&of_world, &mut all)?;
        let expected = |i: usize| match (me, i / 2000) {
            (0 | 1, _) => me as f32,
            (_, half_of) if half_of == half.rank() => 4.0 + 2.0 * half_of as f32,
            (_, other) => 2.0 + other as f32,
        };
        assert!((0..4000).all(|i| all[i] == expected(i)), "rank {me}: {} {}", all[0], all[2000]);
        let collectives = options.build(world)?;
        stream.fill(&of_half, 1.0)?;
        collectives.all_reduce(&of_half, &of_half, ReduceOp::Sum, &stream)?;
        stream.copy_to_host(&of_half, &mut all)?;
        assert_eq!(all, [4.0; 4000]);
        Ok(())
    });
}
