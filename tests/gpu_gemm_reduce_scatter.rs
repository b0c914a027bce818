//! Tests of the matrix product and the reduce-scatter of its rows.

use devcomm::{Buffer, Error, GemmReduceScatter, GemmReduceScatterPlan, Rank, Simulation};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::machines::{Gpus, on_gpus};
use half::bf16;

use GemmReduceScatterPlan::{Unfused, Wide};

/// Elements of a large product on GPUs that are checked. Small and simulated products are checked
/// in full.
const SAMPLES: usize = 512;

/// Returns the element that ranks get if each rounds its product, and then the sum, which is in the
/// order of the ranks.
fn rounded_twice(problem: Problem, ranks: usize, row: usize, column: usize) -> bf16 {
    let product = |rank| problem.exact(rank..rank + 1, row, column) as f32;
    let products = (0..ranks).map(|rank| bf16::from_f32(product(rank)).to_f32());
    bf16::from_f32(products.fold(0.0, |sum, product| sum + product))
}

/// Checks `launches` successive products of these shapes, with the plan `asked` set. Each shape
/// comes with the plan that it must get.
fn check_products(
    rank: &Rank,
    asked: Option<GemmReduceScatterPlan>,
    shapes: &[([usize; 3], GemmReduceScatterPlan)],
    seed: u64,
    launches: usize,
) -> Result<(), Error> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let [m, n] = [0, 1].map(|i| shapes.iter().map(|(shape, _)| shape[i]).max().unwrap());
    let product = GemmReduceScatter::new(comm, &stream, m, n)?;
    product.set_plan(asked)?;
    let mut sets = Vec::new();
    for &(shape @ [m, n, k], plan) in shapes {
        let (problem, me) = (Problem { m, n, k, seed }, rank.rank());
        let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
        a.copy_from_host(&problem.factor(Factor::A, me))?;
        b.copy_from_host(&problem.factor(Factor::B, me))?;
        let c = comm.mem_alloc::<bf16>(m / rank.n_ranks() * n)?;
        // An element that is not written stays NaN.
        c.fill_bytes(0xff)?;
        assert_eq!(product.explain(shape)?.plan, plan, "{shape:?}");
        sets.push((problem, a, b, c));
    }
    rank.barrier()?;
    for _ in 0..launches {
        for (problem, a, b, c) in &sets {
            product.launch(a, b, c, problem.shape())?;
        }
    }
    stream.synchronize()?;
    for (problem, _, _, c) in &sets {
        let own = Problem { m: problem.m / rank.n_ranks(), ..*problem };
        let mut got = vec![bf16::NAN; c.len()];
        c.copy_to_host(&mut got)?;
        let checked: Vec<_> = match rank.is_simulated() || got.len() <= SAMPLES * 16 {
            true => own.all().collect(),
            false => own.samples(SAMPLES).collect(),
        };
        let first = rank.rank() * own.m;
        let wrong = checked.iter().filter(|(row, column)| {
            let right = rounded_twice(*problem, rank.n_ranks(), first + row, *column);
            got[row * own.n + column] != right
        });
        assert_eq!(wrong.count(), 0, "{rank:?}, {asked:?}, {problem:?}");
    }
    rank.barrier()
}

/// Returns simulated GPUs with fewer resident blocks than tiles.
fn small_gpus(ranks: usize) -> Gpus {
    Gpus::from(Simulation::new(ranks).multiprocessors(2))
}

/// The shapes have more tiles than blocks, also an odd number of tiles in each half; the fused
/// kernel does not support the last one.
#[test]
fn each_rank_gets_the_sums_of_its_rows() {
    small_gpus(2).run("each_rank_gets_the_sums_of_its_rows", |rank| {
        let wide: &[_] = match rank.is_simulated() {
            true => &[([512, 520, 24], Wide), ([1024, 16, 72], Wide), ([6, 24, 9], Unfused)],
            false => &[([512, 4104, 1000], Wide), ([8192, 8192, 1024], Wide)],
        };
        check_products(rank, Some(Wide), wide, 7, 1)?;
        check_products(rank, Some(Unfused), &[([512, 24, 72], Unfused), ([6, 7, 9], Unfused)], 8, 1)
    });
}

#[test]
fn each_of_many_ranks_gets_the_sums_of_its_rows() {
    for (ranks, n) in [(4, 520), (8, 16)] {
        small_gpus(ranks).run("each_of_many_ranks_gets_the_sums_of_its_rows", |rank| {
            let shapes = match rank.is_simulated() {
                true => [([ranks * 256, n, 24], Wide), ([2 * ranks * 256, 8, 8], Wide)],
                false => [([3072 * ranks, 4104, 1000], Wide), ([ranks * 256, 8, 8], Wide)],
            };
            check_products(rank, Some(Wide), &shapes, 3, 2)
        });
    }
}

/// There are more steps than those after which a tile is sent, and successive launches use the
/// slots in turn.
#[test]
fn launches_follow_each_other_without_a_reset() {
    small_gpus(2).run("launches_follow_each_other_without_a_reset", |rank| {
        let launches = if rank.is_simulated() { 3 } else { 50 };
        check_products(
            rank,
            Some(Wide),
            &[([512, 40, 520], Wide), ([512, 8, 8], Wide)],
            9,
            launches,
        )
    });
}

#[test]
fn sums_are_right_in_any_order_of_threads() {
    let name = "sums_are_right_in_any_order_of_threads";
    small_gpus(2).run_seeds(name, 0..3, |rank, seed| {
        check_products(rank, Some(Wide), &[([512, 272, 8], Wide)], seed, 2)
    });
    small_gpus(4).run_seeds(name, 0..2, |rank, seed| {
        check_products(rank, Some(Wide), &[([1024, 272, 8], Wide)], seed, 2)
    });
}

#[test]
fn a_shape_with_more_tiles_than_the_largest_is_not_fused() {
    small_gpus(2).run("a_shape_with_more_tiles_than_the_largest_is_not_fused", |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let product = GemmReduceScatter::new(comm, &stream, 512, 64)?;
        product.set_plan(Some(Wide))?;
        assert_eq!(product.explain([512, 64, 8])?.plan, Wide);
        // It has 8192 elements, as many as fit, but they are in more parts of 64 columns.
        let [m, n, k] = [1024, 8, 8];
        assert_eq!(product.explain([m, n, k])?.plan, Unfused);
        let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
        stream.fill(&a, bf16::ONE)?;
        stream.fill(&b, bf16::ONE)?;
        let c = comm.mem_alloc::<bf16>(m / 2 * n)?;
        product.launch(&a, &b, &c, [m, n, k])?;
        stream.synchronize()?;
        let mut got = vec![bf16::NAN; c.len()];
        c.copy_to_host(&mut got)?;
        assert!(got.iter().all(|sum| *sum == bf16::from_f32(2.0 * k as f32)));
        Ok(())
    });
}

/// A measurement chooses one of the plans, the same on all ranks, until a plan is set.
#[test]
fn a_measurement_decides_on_all_ranks_alike() {
    small_gpus(2).run("a_measurement_decides_on_all_ranks_alike", |rank| {
        let shape = if rank.is_simulated() { [512, 16, 16] } else { [8192, 8192, 1024] };
        let [m, n, k] = shape;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
        stream.fill(&a, bf16::ONE)?;
        stream.fill(&b, bf16::ONE)?;
        let c = comm.mem_alloc::<bf16>(m / 2 * n)?;
        let product = GemmReduceScatter::new(comm, &stream, m, n)?;
        let plan = product.measure(&a, &b, &c, shape)?;
        assert_eq!(product.explain(shape)?.to_string(), format!("{plan}, as it was measured"));
        let all = comm.host_all_gather(plan.to_string().as_bytes())?;
        assert_eq!(all[0], all[1]);
        product.set_plan(Some(Unfused))?;
        assert_eq!(product.explain(shape)?.to_string(), "unfused, as it was set");
        product.set_plan(None)?;
        assert_eq!(product.explain(shape)?.plan, plan);
        // One rank has an address that the fused kernel, which does the shape, does not support.
        let (from, few) = (1 - rank.rank(), [m, 8, k]);
        let unaligned = b.device_slice().slice(from..from + 8 * k)?;
        product.set_plan(Some(Wide))?;
        assert_eq!(product.explain(few)?.plan, Wide);
        product.set_plan(None)?;
        assert_eq!(product.measure(&a, &unaligned, &c, few)?, Unfused);
        // Another shape on one rank is an error on all.
        let other = [m, n, if rank.rank() == 0 { k } else { k - 8 }];
        let error = product.measure(&a, &b, &c, other).unwrap_err().to_string();
        assert!(error.contains("GemmReduceScatter::measure: shape is "), "{error}");
        c.fill_bytes(0xff)?;
        product.launch(&a, &b, &c, shape)?;
        stream.synchronize()?;
        let mut got = vec![bf16::NAN; c.len()];
        c.copy_to_host(&mut got)?;
        assert!(got.iter().all(|sum| *sum == bf16::from_f32(2.0 * k as f32)));
        Ok(())
    });
}

/// The ranks' own numbers of multiprocessors lead to different plans, of which one is fused.
#[test]
fn ranks_whose_gpus_differ_have_the_same_plan() {
    let gpus = Gpus::from(Simulation::new(2).multiprocessors_in_turn([4, 8]));
    gpus.run("ranks_whose_gpus_differ_have_the_same_plan", |rank| {
        let shapes: &[_] = match rank.is_simulated() {
            true => &[([1024, 256, 8], Wide)],
            false => &[([8192, 8192, 1024], Wide)],
        };
        check_products(rank, None, shapes, 5, 2)
    });
}

#[test]
fn bad_input_is_refused_with_the_reason() {
    on_gpus("bad_input_is_refused_with_the_reason", 1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (comm.mem_alloc::<bf16>(64 * 64)?, comm.mem_alloc::<bf16>(64 * 64)?);
        let c = comm.mem_alloc::<bf16>(300)?;
        let product = GemmReduceScatter::new(comm, &stream, 64, 64)?;
        for (shape, reason) in [
            ([64, 0, 8], "nothing to do"),
            ([64, 4, 65], "A has 4096 elements"),
            ([4, 64, 65], "B has 4096 elements"),
            ([64, 64, 8], "C has 300 elements"),
            ([65, 64, 8], "larger workspace"),
        ] {
            let error = product.launch(&a, &b, &c, shape).err().map(|e| e.to_string());
            assert!(error.as_ref().is_some_and(|e| e.contains(reason)), "{shape:?}: {error:?}");
        }
        let error = product.set_plan(Some(Wide)).unwrap_err().to_string();
        assert!(error.contains("for 2, 4 or 8 ranks, not 1"), "{error}");
        assert_eq!(product.explain([64; 3])?.to_string(), "unfused, as no kernel was prepared");
        product.launch(&a, &b, &c, [4, 64, 64])?;
        stream.synchronize()
    });
}

#[test]
fn rows_that_ranks_cannot_share_are_refused() {
    on_gpus("rows_that_ranks_cannot_share_are_refused", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let a = comm.mem_alloc::<bf16>(64)?;
        let product = GemmReduceScatter::new(comm, &stream, 8, 8)?;
        let error = product.launch(&a, &a, &a, [7, 8, 8]).unwrap_err().to_string();
        assert!(error.contains("m is 7, and no multiple of the 2 ranks"), "{error}");
        Ok(())
    });
}
