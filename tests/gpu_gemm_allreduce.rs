//! Tests of the matrix product fused with an all-reduce.

use std::num::NonZeroU32;
use std::time::Duration;

use devcomm::{
    CommConfig, Error, GemmAllReduce, GemmAllReducePlan, GemmOptions, LaunchError, Rank, Result,
    Simulation, Window, Wire,
};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::machines::{Gpus, on_gpus};
use half::bf16;

/// Elements of a large product on GPUs that are checked. Small and simulated products are checked
/// in full.
const SAMPLES: usize = 512;

/// Returns shapes smaller than an MMA fragment, larger than a tile, and no multiples of a tile;
/// with `n` odd, even, and a multiple of 8 (16 bytes).
fn mixed_shapes(rank: &Rank) -> Vec<[usize; 3]> {
    if rank.is_simulated() {
        let shapes = [[1, 1, 8], [7, 64, 8], [64, 7, 64], [130, 33, 40], [17, 264, 72]];
        return [&shapes[..], &[[200, 130, 136]]].concat();
    }
    let columns = |m| [1, 7, 64, 1000, 4096].map(|n| (m, n));
    let sizes = [1, 7, 128, 1000].into_iter().flat_map(columns);
    sizes.flat_map(|(m, n)| [8, 64, 1000].map(|k| [m, n, k])).collect()
}

/// Checks C against the sum of the products of the ranks `summed`.
fn require(
    rank: &Rank,
    problem: Problem,
    summed: std::ops::Range<usize>,
    c: &Window<bf16>,
) -> Result<(), Error> {
    let mut got = vec![bf16::NAN; problem.m * problem.n];
    c.copy_to_host(&mut got)?;
    let wrong = if rank.is_simulated() || got.len() <= SAMPLES * 16 {
        problem.count_wrong(summed, &got, problem.all())
    } else {
        problem.count_wrong(summed, &got, problem.samples(SAMPLES))
    };
    assert_eq!(wrong, 0, "{rank:?}, {problem:?}");
    Ok(())
}

/// Checks products of these shapes, with one workspace: each element is rounded once.
fn check_products(rank: &Rank, shapes: &[[usize; 3]], seed: u64) -> Result<(), Error> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let [m, n, k] = [0, 1, 2].map(|i| shapes.iter().map(|shape| shape[i]).max().unwrap());
    let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
    let c = comm.window::<bf16>(m * n)?;
    let gemm = GemmOptions::new().wire(Wire::F32).build(comm, &stream, m, n)?;
    for &[m, n, k] in shapes {
        let (problem, me) = (Problem { m, n, k, seed }, rank.rank());
        a.copy_from_host(&problem.factor(Factor::A, me))?;
        b.copy_from_host(&problem.factor(Factor::B, me))?;
        // An element that no rank writes stays NaN.
        c.fill_bytes(0xff)?;
        rank.barrier()?;
        gemm.launch(&a, &b, &c, [m, n, k])?;
        stream.synchronize()?;
        require(rank, problem, 0..rank.n_ranks(), &c)?;
        rank.barrier()?;
    }
    Ok(())
}

/// Returns simulated GPUs with fewer resident blocks than tiles.
fn small_gpus(gpus: usize) -> Simulation {
    Simulation::new(gpus).multiprocessors(2)
}

fn check_mixed_shapes(name: &str, gpus: usize) {
    Gpus::from(small_gpus(gpus)).run(name, |rank| check_products(rank, &mixed_shapes(rank), 7));
}

#[test]
fn mixed_shapes_are_right_on_one_gpu() {
    check_mixed_shapes("mixed_shapes_are_right_on_one_gpu", 1);
}

#[test]
fn mixed_shapes_are_right_on_two_gpus() {
    check_mixed_shapes("mixed_shapes_are_right_on_two_gpus", 2);
}

#[test]
fn mixed_shapes_are_right_on_three_gpus() {
    check_mixed_shapes("mixed_shapes_are_right_on_three_gpus", 3);
}

#[test]
fn mixed_shapes_are_right_on_four_gpus() {
    check_mixed_shapes("mixed_shapes_are_right_on_four_gpus", 4);
}

#[test]
fn products_are_right_in_any_order_of_threads() {
    let name = "products_are_right_in_any_order_of_threads";
    let shapes = [[140, 300, 24]];
    Gpus::from(small_gpus(3))
        .run_seeds(name, 0..4, |rank, seed| check_products(rank, &shapes, seed));
}

#[test]
fn products_are_right_when_threads_are_interrupted_anywhere() {
    let name = "products_are_right_when_threads_are_interrupted_anywhere";
    let gpus = Gpus::from(small_gpus(2).preempt(true));
    gpus.run_seeds(name, 1..2, |rank, seed| check_products(rank, &[[70, 20, 8]], seed));
}

/// There are more steps along `k` than pipeline stages, so that stages are refilled while slower
/// threads may still read them.
#[test]
fn a_stage_is_not_filled_again_before_all_have_read_it() {
    let name = "a_stage_is_not_filled_again_before_all_have_read_it";
    let shapes = [[70, 40, 328]];
    Gpus::new(1).run_seeds(name, 0..4, |rank, seed| check_products(rank, &shapes, seed));
}

/// The product runs on a split communicator, with fewer blocks than multiprocessors, on the default
/// stream.
#[test]
fn the_ranks_of_a_split_agree_among_themselves() {
    on_gpus("the_ranks_of_a_split_agree_among_themselves", 2, |rank| {
        let (me, stream) = (rank.rank(), rank.default_stream());
        let comm = rank.communicator()?.split(Some(me as i32), 0, &CommConfig::new())?;
        let comm = comm.expect("this rank has a color");
        let problem = Problem { m: 70, n: 40, k: 16, seed: 5 };
        let Problem { m, n, k, .. } = problem;
        let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
        stream.copy_to_device(&problem.factor(Factor::A, me), &a)?;
        stream.copy_to_device(&problem.factor(Factor::B, me), &b)?;
        let c = comm.window::<bf16>(m * n)?;
        let options = GemmOptions::new().max_blocks(NonZeroU32::MIN);
        let gemm = options.build(&comm, &stream, m, n)?;
        assert_eq!(format!("{gemm:?}"), "GemmAllReduce(bf16, 1 blocks)");
        gemm.launch(&a, &b, &c, [m, n, k])?;
        stream.synchronize()?;
        require(rank, problem, me..me + 1, &c)
    });
}

#[test]
fn one_block_is_enough_for_many_tiles() {
    let gpus = Gpus::from(Simulation::new(2).multiprocessors(1));
    gpus.run("one_block_is_enough_for_many_tiles", |rank| {
        check_products(rank, &[[300, 520, 16]], 3)
    });
}

/// Launches follow each other in a stream, with alternating shapes: the workspace's flags are not
/// reset, and each launch uses their next epoch.
#[test]
fn many_launches_need_no_reset() {
    on_gpus("many_launches_need_no_reset", 2, |rank| {
        let (launches, shapes) = match rank.is_simulated() {
            true => (4, [(129, 40, 32), (64, 33, 8)]),
            false => (50, [(1000, 520, 64), (64, 33, 8)]),
        };
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let problems = shapes.map(|(m, n, k)| Problem { m, n, k, seed: 9 });
        let (m, n, _) = shapes[0];
        let gemm = GemmOptions::new().wire(Wire::F32).build(comm, &stream, m, n)?;
        let mut sets = Vec::new();
        for problem in problems {
            let Problem { m, n, k, .. } = problem;
            let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
            a.copy_from_host(&problem.factor(Factor::A, rank.rank()))?;
            b.copy_from_host(&problem.factor(Factor::B, rank.rank()))?;
            let c = comm.window::<bf16>(m * n)?;
            c.fill_bytes(0xff)?;
            sets.push((a, b, c));
        }
        rank.barrier()?;
        for _ in 0..launches {
            for (Problem { m, n, k, .. }, (a, b, c)) in problems.iter().zip(&sets) {
                gemm.launch(a, b, c, [*m, *n, *k])?;
            }
        }
        stream.synchronize()?;
        for (problem, (_, _, c)) in problems.iter().zip(&sets) {
            require(rank, *problem, 0..2, c)?;
        }
        Ok(())
    });
}

/// Returns the element that ranks get if each rounds its product, and then the sum, which is in the
/// order of the ranks.
fn rounded_twice(problem: Problem, ranks: usize, (row, column): (usize, usize)) -> bf16 {
    let product = |rank| problem.exact(rank..rank + 1, row, column) as f32;
    let products = (0..ranks).map(|rank| bf16::from_f32(product(rank)).to_f32());
    bf16::from_f32(products.fold(0.0, |sum, product| sum + product))
}

/// The plans for any number of rows that round each rank's product.
const ROUNDING: [Option<GemmAllReducePlan>; 2] =
    [Some(GemmAllReducePlan::Unfused), Some(GemmAllReducePlan::Wide)];

/// Checks products of these shapes by each of the plans, `launches` times in a row. `None` stands
/// for the default plan of each shape.
fn is_rounded_twice(
    rank: &Rank,
    plans: &[Option<GemmAllReducePlan>],
    shapes: &[[usize; 3]],
    seed: u64,
    launches: usize,
) -> Result<(), Error> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let [m, n] = [0, 1].map(|i| shapes.iter().map(|shape| shape[i]).max().unwrap());
    let gemm = GemmAllReduce::new(comm, &stream, m, n)?;
    for &plan in plans {
        gemm.set_plan(plan)?;
        let mut sets = Vec::new();
        for &shape @ [m, n, k] in shapes {
            let (problem, me) = (Problem { m, n, k, seed }, rank.rank());
            let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
            a.copy_from_host(&problem.factor(Factor::A, me))?;
            b.copy_from_host(&problem.factor(Factor::B, me))?;
            let c = comm.window::<bf16>(m * n)?;
            let how = gemm.explain(shape)?.plan;
            assert_eq!(how, plan.unwrap_or(how), "{shape:?}");
            sets.push((problem, a, b, c));
        }
        rank.barrier()?;
        for _ in 0..launches {
            for (problem, a, b, c) in &sets {
                // An element that no rank writes stays NaN. This rank's stream orders the fill
                // before what peers store to C.
                stream.fill(c, bf16::NAN)?;
                gemm.launch(a, b, c, problem.shape())?;
            }
        }
        stream.synchronize()?;
        for (problem, _, _, c) in &sets {
            let mut got = vec![bf16::NAN; problem.m * problem.n];
            c.copy_to_host(&mut got)?;
            let all = problem.all().collect::<Vec<_>>();
            let checked = match rank.is_simulated() || all.len() <= SAMPLES * 16 {
                true => all,
                false => problem.samples(SAMPLES).collect(),
            };
            let is_wrong = |&&(row, column): &&(usize, usize)| {
                let right = rounded_twice(*problem, rank.n_ranks(), (row, column));
                got[row * problem.n + column] != right
            };
            let wrong = checked.iter().filter(is_wrong).count();
            assert_eq!(wrong, 0, "{rank:?}, {plan:?}, {problem:?}");
        }
        rank.barrier()?;
    }
    Ok(())
}

/// The shapes have rows and columns that are no multiples of a tile, a cluster's tiles beyond C,
/// and more tiles than blocks.
#[test]
fn rounded_products_are_added_on_both_ranks() {
    let name = "rounded_products_are_added_on_both_ranks";
    Gpus::from(small_gpus(2)).run(name, |rank| {
        let shapes: &[[usize; 3]] = match rank.is_simulated() {
            true => &[[1, 8, 8], [130, 264, 72], [260, 520, 24]],
            false => &[[1, 8, 8], [130, 264, 72], [1000, 4104, 1000], [4096, 8192, 1024]],
        };
        is_rounded_twice(rank, &ROUNDING, shapes, 7, 1)?;
        is_rounded_twice(rank, &[Some(GemmAllReducePlan::Strips)], shapes, 7, 1)
    });
}

/// The shapes have few rows, tiles that do not fill the GPU, and tiles that fill it more than once.
/// In successive launches the plans take turns.
#[test]
fn the_plan_follows_from_the_shape_and_the_ranks() {
    let name = "the_plan_follows_from_the_shape_and_the_ranks";
    for (ranks, for_few_rows) in [(2, "swapped:"), (4, "unfused")] {
        Gpus::from(Simulation::new(ranks).multiprocessors(8)).run(name, |rank| {
            let shapes: &[_] = match rank.is_simulated() {
                true => &[[9, 40, 72], [300, 520, 16], [512, 1040, 16]],
                false => &[[9, 4096, 1024], [300, 520, 1000], [4096, 8192, 1024]],
            };
            let gemm = GemmAllReduce::new(rank.communicator()?, &rank.stream()?, 4096, 8192)?;
            let plan = |shape| {
                gemm.explain(shape).map_or_else(|e| e.to_string(), |how| how.plan.to_string())
            };
            let [few, few_tiles, many_tiles] = [0, 1, 2].map(|i| plan(shapes[i]));
            assert!(few.starts_with(for_few_rows), "{few}");
            assert_eq!([few_tiles, many_tiles], ["unfused", "wide"]);
            // A plan that was set and given up changes no later choice, not even for shapes that
            // were not asked about.
            gemm.set_plan(Some(GemmAllReducePlan::Strips))?;
            gemm.set_plan(None)?;
            let other = plan([shapes[0][0] - 1, shapes[0][1], shapes[0][2]]);
            assert!(other.starts_with(for_few_rows), "{other}");
            is_rounded_twice(rank, &[None], shapes, 3, 2)
        });
    }
}

/// There are more steps than those after which a tile is sent, and successive launches use the
/// slots in turn.
#[test]
fn rounded_products_follow_each_other_without_a_reset() {
    let name = "rounded_products_follow_each_other_without_a_reset";
    Gpus::from(small_gpus(2)).run(name, |rank| {
        let shapes = [[130, 264, 520], [9, 16, 16]];
        let launches = if rank.is_simulated() { 3 } else { 50 };
        is_rounded_twice(rank, &ROUNDING, &shapes, 9, launches)
    });
}

/// A measurement chooses one of the plans, the same on all ranks, until a plan is set.
#[test]
fn a_measurement_decides_on_all_ranks_alike() {
    let name = "a_measurement_decides_on_all_ranks_alike";
    Gpus::from(small_gpus(2)).run(name, |rank| {
        let shape = if rank.is_simulated() { [260, 8, 16] } else { [512, 4096, 1024] };
        let [m, n, k] = shape;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
        stream.fill(&a, bf16::ONE)?;
        stream.fill(&b, bf16::ONE)?;
        let c = comm.window::<bf16>(m * n)?;
        let gemm = GemmAllReduce::new(comm, &stream, m, n)?;
        let plan = gemm.measure(&a, &b, &c, shape)?;
        assert!(gemm.plans(shape)?.contains(&plan), "{plan}");
        assert_eq!(gemm.explain(shape)?.to_string(), format!("{plan}, as it was measured"));
        let all = comm.host_all_gather(plan.to_string().as_bytes())?;
        assert_eq!(all[0], all[1]);
        gemm.set_plan(Some(GemmAllReducePlan::Unfused))?;
        assert_eq!(gemm.explain(shape)?.to_string(), "unfused, as it was set");
        gemm.set_plan(None)?;
        assert_eq!(gemm.explain(shape)?.plan, plan);
        // The workspace of strips is too small for this shape.
        let (rows, large) = ([2 * m, n, 8], comm.window::<bf16>(2 * m * n)?);
        let too_large = gemm.measure(&a, &b, &large, rows)?;
        assert_ne!(too_large, GemmAllReducePlan::Strips);
        // Another shape on one rank is an error on all.
        let other = [m, n, if rank.rank() == 0 { k } else { k - 8 }];
        let error = gemm.measure(&a, &b, &c, other).unwrap_err().to_string();
        assert!(error.contains("GemmAllReduce::measure: shape is "), "{error}");
        gemm.launch(&a, &b, &c, shape)?;
        stream.synchronize()
    });
}

#[test]
fn rounded_products_are_added_whatever_the_order_in_which_threads_run() {
    let name = "rounded_products_are_added_whatever_the_order_in_which_threads_run";
    let shapes = [[70, 272, 24], [140, 24, 8]];
    Gpus::from(small_gpus(2))
        .run_seeds(name, 0..4, |rank, seed| is_rounded_twice(rank, &ROUNDING, &shapes, seed, 2));
}

/// Where two neighbours are zeros and one of them is negative, a message has positive zeros only.
#[test]
fn both_ranks_get_the_same_zeros() {
    on_gpus("both_ranks_get_the_same_zeros", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (comm.mem_alloc::<bf16>(8)?, comm.mem_alloc::<bf16>(64)?);
        // The products are +0, 1, and a negative number that is rounded to -0.
        let tiny = bf16::from_f32(2.0_f32.powi(-70));
        let mut host_a = [bf16::ZERO; 8];
        (host_a[0], host_a[1]) = (tiny, bf16::ONE);
        let mut host_b = [bf16::ZERO; 64];
        for column in 0..8 {
            host_b[8 * column] = if column % 2 == 1 { -tiny } else { bf16::ZERO };
            let one = column % 2 == 0 && rank.rank() == 1;
            host_b[8 * column + 1] = if one { bf16::ONE } else { bf16::ZERO };
        }
        a.copy_from_host(&host_a)?;
        b.copy_from_host(&host_b)?;
        let (c, other) = (comm.window::<bf16>(8)?, comm.mem_alloc::<bf16>(16)?);
        let gemm = GemmAllReduce::new(comm, &stream, 1, 8)?;
        // With NCCL's sum or the short messages of `Collectives`, zeros may differ.
        for plan in ["wide", "swapped:8x64:1", "strips"].map(|plan| plan.parse().unwrap()) {
            gemm.set_plan(Some(plan))?;
            gemm.launch(&a, &b, &c, [1, 8, 8])?;
            comm.all_gather(&c, &other, &stream)?;
            stream.synchronize()?;
            let mut got = [bf16::NAN; 16];
            other.copy_to_host(&mut got)?;
            let bits = got.map(bf16::to_bits);
            assert_eq!(bits[..8], bits[8..], "{plan}");
            assert_eq!(got[..2], [bf16::ONE, bf16::ZERO], "{plan}");
        }
        Ok(())
    });
}

/// The plans have whole tiles, and tiles that a cluster shares, whose blocks send their shares.
#[test]
fn rounded_products_of_few_rows_are_added_on_both_ranks() {
    let name = "rounded_products_of_few_rows_are_added_on_both_ranks";
    let gpus = Gpus::from(Simulation::new(2).multiprocessors(4));
    gpus.run(name, |rank| {
        for (plans, m) in [
            (&["swapped:8x64:1", "swapped:8x128:2", "swapped:16x64:2"][..], 7),
            (&["swapped:32x64:4", "swapped:32x128:1"], 30),
            (&["swapped:64x64:2", "swapped:64x128:4"], 64),
            // These are more rows than a tile has, and no multiple of the rows stored together.
            (&["swapped:48x128:2", "swapped:80x128:1:2x2", "swapped:96x64:1"], 100),
            (&["swapped:128x64:2", "swapped:128x128:1", "swapped:128x128:1:2x1"], 130),
        ] {
            let plans: Vec<_> = plans.iter().map(|plan| Some(plan.parse().unwrap())).collect();
            // Less than a tile, then more tiles than there are clusters.
            let shapes = [[m, 40, 72], [m, 584, 136]];
            is_rounded_twice(rank, &plans, &shapes, 11, 2)?;
        }
        Ok(())
    });
}

#[test]
fn rounded_products_of_few_rows_are_added_whatever_the_order_in_which_threads_run() {
    let name = "rounded_products_of_few_rows_are_added_whatever_the_order_in_which_threads_run";
    let gpus = Gpus::from(Simulation::new(2).multiprocessors(4));
    gpus.run_seeds(name, 0..4, |rank, seed| {
        let plans = ["swapped:16x64:2", "swapped:64x64:1"].map(|plan| Some(plan.parse().unwrap()));
        is_rounded_twice(rank, &plans, &[[9, 200, 72], [50, 8, 8]], seed, 2)
    });
}

/// Checks [`is_rounded_twice`] for two launches in a row on `ranks` ranks; simulated GPUs have
/// `multiprocessors`.
fn are_rounded_twice(
    name: &str,
    (ranks, multiprocessors): (usize, u32),
    plans: &[&str],
    simulated: &[[usize; 3]],
    large: &[[usize; 3]],
) {
    let plans: Vec<_> = plans.iter().map(|plan| Some(plan.parse().unwrap())).collect();
    Gpus::from(Simulation::new(ranks).multiprocessors(multiprocessors)).run(name, |rank| {
        let shapes = if rank.is_simulated() { simulated } else { large };
        is_rounded_twice(rank, &plans, shapes, 5, 2)
    });
}

/// The shapes have fewer tiles than ranks, and more columns of tiles than ranks.
#[test]
fn rounded_tiles_of_many_ranks_are_added_by_their_owners() {
    let name = "rounded_tiles_of_many_ranks_are_added_by_their_owners";
    let large = [[1, 8, 8], [1000, 4104, 1000], [4096, 8192, 1024]];
    let shapes = [[1, 8, 8], [600, 520, 24], [130, 2312, 72]];
    are_rounded_twice(name, (4, 4), &["wide"], &shapes, &large);
    are_rounded_twice(name, (3, 2), &["strips"], &[[70, 300, 24], [9, 7, 8]], &large);
    are_rounded_twice(name, (8, 2), &["wide"], &[[300, 520, 8]], &large);
}

#[test]
fn rounded_tiles_of_many_ranks_are_added_whatever_the_order_in_which_threads_run() {
    let name = "rounded_tiles_of_many_ranks_are_added_whatever_the_order_in_which_threads_run";
    Gpus::from(small_gpus(4)).run_seeds(name, 0..3, |rank, seed| {
        is_rounded_twice(rank, &[Some(GemmAllReducePlan::Wide)], &[[270, 520, 8]], seed, 2)
    });
}

#[test]
fn rounded_products_of_few_rows_are_added_on_many_ranks() {
    let name = "rounded_products_of_few_rows_are_added_on_many_ranks";
    let large = [[7, 4104, 1000], [7, 8192, 4096]];
    let small = ["swapped:8x64:1", "swapped:16x64:2"];
    are_rounded_twice(name, (3, 4), &small, &[[7, 40, 72], [7, 392, 136]], &large);
    are_rounded_twice(name, (8, 2), &small, &[[7, 136, 24]], &large);
    let tall = ["swapped:32x64:4", "swapped:64x128:2", "swapped:128x128:1:2x1"];
    are_rounded_twice(name, (4, 4), &tall, &[[130, 584, 72]], &[[130, 4104, 1000]]);
}

#[test]
fn rounded_products_of_few_rows_are_added_on_many_ranks_whatever_the_order_of_threads() {
    let name = "rounded_products_of_few_rows_are_added_on_many_ranks_whatever_the_order_of_threads";
    Gpus::from(Simulation::new(4).multiprocessors(4)).run_seeds(name, 0..3, |rank, seed| {
        is_rounded_twice(
            rank,
            &[Some("swapped:16x64:2".parse().unwrap())],
            &[[9, 200, 72]],
            seed,
            2,
        )
    });
}

/// Returns a rank's product of random numbers, and the bound of the error that each element has
/// when it travels as `wire`.
fn product_and_bound(problem: Problem, rank: usize, wire: Wire) -> (Vec<f64>, Vec<f64>) {
    let Problem { m, n, k, .. } = problem;
    let factor = |factor| -> Vec<bf16> { problem.noise(factor, rank) };
    let (a, b) = (factor(Factor::A), factor(Factor::B));
    let product = |(row, column): (usize, usize)| -> f64 {
        let terms = a[row * k..][..k].iter().zip(&b[column * k..][..k]);
        terms.map(|(a, b)| a.to_f64() * b.to_f64()).sum()
    };
    let products = problem.all().map(product).collect::<Vec<_>>();
    let mut bounds = Vec::with_capacity(m * n);
    for row in products.chunks(n) {
        for sharing in row.chunks(64) {
            let largest = sharing.iter().fold(0.0, |most: f64, x| most.max(x.abs())) as f32;
            let bound = |x: &f64| f64::from(wire.error_bound(*x as f32, largest));
            bounds.extend(sharing.iter().map(bound));
        }
    }
    (products, bounds)
}

/// Returns the mean error of a product by `plan` whose partial sums travel as `wire`. Checks that
/// no element is off by more than the type's bound and roundings, that all ranks have the same
/// bits, and that a graph that is launched twice has them too.
fn mean_error(
    rank: &Rank,
    problem: Problem,
    wire: Wire,
    plan: GemmAllReducePlan,
) -> Result<f64, Error> {
    let (comm, stream, me) = (rank.communicator()?, rank.stream()?, rank.rank());
    let Problem { m, n, k, .. } = problem;
    let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
    a.copy_from_host(&problem.noise(Factor::A, me))?;
    b.copy_from_host(&problem.noise(Factor::B, me))?;
    let (c, again) = (comm.window::<bf16>(m * n)?, comm.window::<bf16>(m * n)?);
    c.fill_bytes(0xff)?;
    rank.barrier()?;
    let gemm = GemmOptions::new().wire(wire).build(comm, &stream, m, n)?;
    gemm.set_plan(Some(plan))?;
    assert_eq!((gemm.wire(), gemm.explain([m, n, k])?.plan), (wire, plan));
    gemm.launch(&a, &b, &c, [m, n, k])?;
    let graph = stream.capture(|| gemm.launch(&a, &b, &again, [m, n, k]))?;
    graph.launch(&stream)?;
    graph.launch(&stream)?;
    stream.synchronize()?;
    let (mut got, mut repeated) = (vec![bf16::NAN; m * n], vec![bf16::ZERO; m * n]);
    c.copy_to_host(&mut got)?;
    again.copy_to_host(&mut repeated)?;
    let bits = |c: &[bf16]| c.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got), bits(&repeated), "{wire}, {plan}, {problem:?}");
    let all = comm.host_all_gather(&bits(&got))?;
    assert!(all.iter().all(|theirs| *theirs == all[0]), "{wire}, {plan}, {problem:?}");
    let parts: Vec<_> =
        (0..rank.n_ranks()).map(|rank| product_and_bound(problem, rank, wire)).collect();
    let mut errors = 0.0;
    for (i, got) in got.iter().enumerate() {
        let right: f64 = parts.iter().map(|(products, _)| products[i]).sum();
        let wire_bound: f64 = parts.iter().map(|(_, bounds)| bounds[i]).sum();
        // Sums are rounded to bf16, and partial sums to f32.
        let rounded = (right.abs() + wire_bound) / 256.0 + k as f64 / f64::from(1 << 20);
        let bound = wire_bound + rounded;
        let error = (got.to_f64() - right).abs();
        let place = (i / n, i % n);
        assert!(error <= bound, "{wire}, {plan}, {problem:?}, {place:?}: {error} > {bound}");
        errors += error;
    }
    Ok(errors / (m * n) as f64)
}

/// Strips have several tiles, and reach beyond the last row and column; rows of C do not begin at
/// multiples of 16 bytes.
#[test]
fn partial_sums_are_as_exact_as_their_type_says() {
    let name = "partial_sums_are_as_exact_as_their_type_says";
    for (ranks, m, n, large) in [(2, 70, 136, 2000), (3, 9, 75, 1000), (8, 66, 21, 300)] {
        Gpus::from(small_gpus(ranks)).run(name, |rank| {
            let (m, k) = if rank.is_simulated() { (m, 16) } else { (large, 200) };
            let problem = Problem { m, n, k, seed: 6 };
            let error = |wire| mean_error(rank, problem, wire, GemmAllReducePlan::Strips);
            let [f32, bf16, e4m3] = [error(Wire::F32)?, error(Wire::Bf16)?, error(Wire::E4m3)?];
            assert!(f32 < bf16 && 4.0 * bf16 < e4m3, "{problem:?}: {f32}, {bf16}, {e4m3}");
            Ok(())
        });
    }
}

#[test]
fn eight_bit_partial_sums_arrive_whatever_the_order_in_which_threads_run() {
    let name = "eight_bit_partial_sums_arrive_whatever_the_order_in_which_threads_run";
    Gpus::from(small_gpus(2)).run_seeds(name, 0..4, |rank, seed| {
        let problem = Problem { m: 70, n: 72, k: 8, seed };
        mean_error(rank, problem, Wire::E4m3, GemmAllReducePlan::Strips).map(drop)
    });
}

/// The shapes have rows and columns that are no multiples of a tile, more tiles than blocks, and a
/// cluster's tiles beyond C.
#[test]
fn eight_bit_tiles_are_as_exact_as_they_say() {
    let name = "eight_bit_tiles_are_as_exact_as_they_say";
    Gpus::from(small_gpus(2)).run(name, |rank| {
        let shapes: &[_] = match rank.is_simulated() {
            true => &[[130, 264, 16], [9, 520, 8], [9, 8, 200]],
            false => &[[1, 8, 8], [130, 264, 72], [260, 520, 1600], [2048, 4104, 256]],
        };
        for &[m, n, k] in shapes {
            let problem = Problem { m, n, k, seed: 2 };
            mean_error(rank, problem, Wire::E4m3, GemmAllReducePlan::Wide)?;
        }
        Ok(())
    });
}

#[test]
fn eight_bit_tiles_are_added_whatever_the_order_in_which_threads_run() {
    let name = "eight_bit_tiles_are_added_whatever_the_order_in_which_threads_run";
    Gpus::from(small_gpus(2)).run_seeds(name, 0..3, |rank, seed| {
        let problem = Problem { m: 20, n: 272, k: 8, seed };
        mean_error(rank, problem, Wire::E4m3, GemmAllReducePlan::Wide).map(drop)
    });
}

/// Partial sums of another type than bf16 travel by strips, and 8-bit ones of large products by
/// tiles; ranks agree on the type.
#[test]
fn a_type_of_partial_sums_has_its_plan_and_is_the_same_on_all_ranks() {
    let name = "a_type_of_partial_sums_has_its_plan_and_is_the_same_on_all_ranks";
    Gpus::from(Simulation::new(2).multiprocessors(8)).run(name, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let options = GemmOptions::new();
        for (wire, why) in [
            (Wire::F32, "strips, as partial sums travel in f32"),
            (Wire::E4m3, "strips, as partial sums travel in e4m3, each off by up to a sixteenth"),
        ] {
            let gemm = options.wire(wire).build(comm, &stream, 300, 1040)?;
            assert_eq!(gemm.explain([9, 40, 72])?.to_string(), why);
            let has_wide = wire == Wire::E4m3 && rank.is_simulated();
            let large = gemm.explain([300, 1040, 16])?.to_string();
            assert_eq!(
                large,
                if has_wide { why.replace("strips", "wide") } else { why.to_owned() }
            );
            for plan in ["wide", "unfused", "swapped:8x64:1"] {
                if plan == "wide" && wire == Wire::E4m3 {
                    continue;
                }
                let error = gemm.set_plan(Some(plan.parse().unwrap())).unwrap_err().to_string();
                let reason = format!("`{plan}` does not send partial sums in {wire}: set `strips`");
                assert!(error.contains(&reason), "{error}");
            }
            gemm.set_plan(Some(GemmAllReducePlan::Strips))?;
        }
        let mine = if rank.rank() == 0 { Wire::F32 } else { Wire::E4m3 };
        let error = options.wire(mine).build(comm, &stream, 8, 8).unwrap_err().to_string();
        assert!(error.contains("wire is f32 on rank 0 and e4m3 on rank 1"), "{error}");
        Ok(())
    });
}

#[test]
fn a_plan_that_a_machine_cannot_do_is_refused_with_the_reason() {
    on_gpus("a_plan_that_a_machine_cannot_do_is_refused_with_the_reason", 1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        for wire in [Wire::E4m3, Wire::Bf16] {
            let gemm = GemmOptions::new().wire(wire).build(comm, &stream, 64, 64)?;
            let error = gemm.set_plan(Some(GemmAllReducePlan::Wide)).unwrap_err().to_string();
            assert!(error.contains("`wide` needs several ranks"), "{error}");
            // Only these plans do what is advised.
            assert_eq!(error.contains("or `unfused`"), wire == Wire::Bf16, "{error}");
        }
        let gemm = GemmAllReduce::new(comm, &stream, 64, 64)?;
        let why = gemm.explain([64, 64, 64])?.to_string();
        assert_eq!(why, "strips, as no other plan was set that can do it");
        gemm.set_plan(Some(GemmAllReducePlan::Unfused))?;
        assert_eq!(gemm.explain([64, 64, 64])?.to_string(), "unfused, as it was set");
        gemm.set_plan(None)
    });
}

/// Rank 1 launches its product late, so that a deadline ends that of rank 0; what rank 1 stores
/// there must not be freed. Each plan has other threads that wait for those that wait for the
/// peer: threads that load a next tile; a warpgroup or lanes without elements of C; the block of a
/// cluster that has no rows to add, but sends the next tile.
#[test]
fn products_whose_peer_is_absent_end_at_a_deadline() {
    let name = "products_whose_peer_is_absent_end_at_a_deadline";
    for (plan, simulated, large) in [
        ("swapped:8x64:1", [7, 584, 4096], [7, 28672, 8192]),
        ("swapped:8x128:1", [7, 64, 72], [7, 64, 1024]),
        ("swapped:8x64:1", [1, 64, 72], [1, 64, 1024]),
        ("swapped:8x128:2", [7, 1160, 72], [7, 57344, 1024]),
        ("wide", [300, 520, 72], [4096, 8192, 1024]),
        ("strips", [70, 300, 24], [128, 4096, 1024]),
    ] {
        let gpus = Gpus::from(Simulation::new(2).multiprocessors(4)).unchecked();
        gpus.run(name, |rank| {
            let shape @ [m, n, k] = if rank.is_simulated() { simulated } else { large };
            let (comm, stream) = (rank.communicator()?, rank.stream()?);
            let is_aborted = |ended: &Result<()>| {
                matches!(ended, Err(Error::Launch(LaunchError::KernelAborted { .. })))
            };
            let (a, b) = (comm.mem_alloc(m * k)?, comm.mem_alloc(n * k)?);
            let c = comm.window(m * n)?;
            let product = GemmAllReduce::new(comm, &stream, m, n)?;
            product.set_plan(Some(plan.parse().unwrap()))?;
            if rank.rank() == 0 {
                product.launch(&a, &b, &c, shape)?;
                let ended = stream.synchronize_within(Duration::from_millis(30));
                assert!(is_aborted(&ended), "{plan} of {shape:?}: {ended:?}");
                drop((product, c));
                rank.barrier()?;
            } else {
                rank.barrier()?;
                product.launch(&a, &b, &c, shape)?;
                let ended = stream.synchronize_within(Duration::from_millis(50));
                assert!(ended.is_ok() || is_aborted(&ended), "{plan}, late: {ended:?}");
            }
            rank.barrier()
        });
    }
}

/// Unsupported input launches nothing, and the `GemmAllReduce` still works afterwards.
#[test]
fn bad_input_is_refused_with_the_reason() {
    on_gpus("bad_input_is_refused_with_the_reason", 1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (comm.mem_alloc::<bf16>(64 * 64)?, comm.mem_alloc::<bf16>(64 * 64)?);
        let c = comm.window::<bf16>(300 * 300)?;
        let build = |m, n| GemmAllReduce::new(comm, &stream, m, n);
        let gemm = build(64, 64)?;
        for (shape, reason) in [
            ([64, 64, 12], "k is 12"),
            ([64, 0, 8], "nothing to do"),
            ([65, 64, 64], "A has 4096 elements"),
            ([64, 65, 64], "B has 4096 elements"),
            ([512, 512, 8], "C has 90000 elements"),
            ([290, 290, 8], "larger workspace"),
        ] {
            let error = gemm.launch(&a, &b, &c, shape).err().map(|e| e.to_string());
            assert!(error.as_ref().is_some_and(|e| e.contains(reason)), "{shape:?}: {error:?}");
        }
        assert!(build(0, 64).is_err() && build(usize::MAX, 64).is_err());
        gemm.launch(&a, &b, &c, [64, 64, 64])?;
        stream.synchronize()
    });
}

/// Only the first column of the factors is not 0, so that row `i` of the result is
/// `b[j] * (ranks * a[i] + 0 + 1 + ..)`, which is exact.
#[test]
fn a_product_has_more_elements_than_31_bits_and_bytes_than_32_count() {
    let gpus = Gpus::new(2).only_real("memory for a product of 4 GiB");
    gpus.run("a_product_has_more_elements_than_31_bits_and_bytes_than_32_count", |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let [m, n, k] = [(1 << 16) + 8, (1 << 15) + 8, 64];
        let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
        let c = comm.window::<bf16>(m * n)?;
        let factor = |rows: usize, value: &dyn Fn(usize) -> usize| -> Vec<bf16> {
            let at = |i| if i % k == 0 { value(i / k) } else { 0 };
            (0..rows * k).map(|i| bf16::from_f32(at(i) as f32)).collect()
        };
        let ranks = rank.n_ranks();
        a.copy_from_host(&factor(m, &|i| i % 7 + rank.rank()))?;
        b.copy_from_host(&factor(n, &|j| j % 8))?;
        let rows: Vec<Vec<bf16>> = (0..7)
            .map(|i| {
                let sum = (0..ranks).map(|rank| i + rank).sum::<usize>();
                (0..n).map(|j| bf16::from_f32((sum * (j % 8)) as f32)).collect()
            })
            .collect();
        let gemm = GemmAllReduce::new(comm, &stream, m, n)?;
        let mut got = vec![bf16::ZERO; m * n];
        for plan in gemm.plans([m, n, k])? {
            c.fill_bytes(0xff)?;
            rank.barrier()?;
            gemm.set_plan(Some(plan))?;
            gemm.launch(&a, &b, &c, [m, n, k])?;
            stream.synchronize()?;
            c.copy_to_host(&mut got)?;
            for (i, row) in got.chunks(n).enumerate() {
                assert!(row == rows[i % 7], "row {i} by {plan}");
            }
            rank.barrier()?;
        }
        Ok(())
    });
}
