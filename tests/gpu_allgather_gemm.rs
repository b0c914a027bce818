//! Tests of the all-gather of A's rows and the product.

use devcomm::sim::Lag;
use devcomm::{
    Activation, AllGatherGemm, AllGatherGemmPlan, Buffer, Error, Rank, Simulation, Stream,
    SymmetricBuffer,
};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::machines::{Gpus, on_gpus};
use half::bf16;

use AllGatherGemmPlan::{Fused, Unfused};

/// The number of elements that are checked of a large product on GPUs. Small and simulated products
/// are checked in full.
const SAMPLES: usize = 512;

/// A product on this rank: its rows of the A that the ranks share, its B and its C.
struct Set {
    problem: Problem,
    a: SymmetricBuffer<bf16>,
    b: SymmetricBuffer<bf16>,
    c: SymmetricBuffer<bf16>,
}

impl Set {
    fn new(rank: &Rank, shape: [usize; 3], seed: u64) -> Result<Self, Error> {
        let comm = rank.communicator()?;
        let [m, n, k] = shape;
        let problem = Problem { m, n, k, seed };
        let all: Vec<bf16> = problem.factor(Factor::A, 0);
        let part = all.len() / rank.n_ranks();
        let set = Self {
            problem,
            a: comm.mem_alloc(part)?,
            b: comm.mem_alloc(n * k)?,
            c: comm.mem_alloc(m * n)?,
        };
        set.a.copy_from_host(&all[rank.rank() * part..][..part])?;
        set.b.copy_from_host(&problem.factor(Factor::B, 0))?;
        set.poison()?;
        Ok(set)
    }

    /// Fills C with NaN: an element that no kernel writes stays NaN, which a check counts as wrong.
    fn poison(&self) -> Result<(), Error> {
        self.c.fill_bytes(0xff)
    }

    fn launch(&self, product: &AllGatherGemm) -> Result<(), Error> {
        product.launch(&self.a, &self.b, &self.c, self.problem.shape())
    }

    fn check(&self, rank: &Rank) -> Result<(), Error> {
        let (problem, mut got) = (self.problem, vec![bf16::NAN; self.c.len()]);
        self.c.copy_to_host(&mut got)?;
        let wrong = match rank.is_simulated() || got.len() <= SAMPLES * 16 {
            true => problem.count_wrong(0..1, &got, problem.all()),
            false => problem.count_wrong(0..1, &got, problem.samples(SAMPLES)),
        };
        assert_eq!(wrong, 0, "{rank:?}, {problem:?}");
        Ok(())
    }
}

/// Prepares products on this stream that are as large as the largest of these sets.
fn product(
    rank: &Rank,
    stream: &Stream,
    sets: &[Set],
    plan: AllGatherGemmPlan,
) -> Result<AllGatherGemm, Error> {
    let most = |extent: fn(&Problem) -> usize| {
        sets.iter().map(|set| extent(&set.problem)).max().expect("a product")
    };
    let (m, k) = (most(|problem| problem.m), most(|problem| problem.k));
    let product = AllGatherGemm::new(rank.communicator()?, stream, m, k)?;
    product.set_plan(Some(plan))?;
    Ok(product)
}

/// Launches the products of these shapes one after the other, all of them `launches` times, and
/// checks the results of the last time. The plan is set to `asked`; with it, each shape must get
/// the plan that stands beside it.
fn check_products(
    rank: &Rank,
    asked: AllGatherGemmPlan,
    shapes: &[([usize; 3], AllGatherGemmPlan)],
    seed: u64,
    launches: usize,
) -> Result<(), Error> {
    let set = |(i, (shape, _)): (usize, &([usize; 3], _))| Set::new(rank, *shape, seed + i as u64);
    let sets: Vec<_> = shapes.iter().enumerate().map(set).collect::<Result<_, _>>()?;
    let stream = rank.stream()?;
    let product = product(rank, &stream, &sets, asked)?;
    for (shape, plan) in shapes {
        assert_eq!(product.explain(*shape)?.plan, *plan, "{shape:?}");
    }
    rank.barrier()?;
    for _ in 0..launches {
        sets.iter().try_for_each(|set| set.launch(&product))?;
    }
    stream.synchronize()?;
    sets.iter().try_for_each(|set| set.check(rank))?;
    rank.barrier()
}

/// Returns simulated GPUs with fewer resident blocks than tiles.
fn small_gpus(ranks: usize) -> Gpus {
    Gpus::from(Simulation::new(ranks).multiprocessors(2))
}

/// The shapes have tiles with rows of one rank and of two, a last tile that is not whole, columns
/// that TMA does not store, and a number of terms for which there is no fused kernel.
#[test]
fn each_rank_gets_its_product_with_the_rows_of_two() {
    small_gpus(2).run("each_rank_gets_its_product_with_the_rows_of_two", |rank| {
        let fused: &[_] = match rank.is_simulated() {
            true => &[
                ([512, 264, 72], Fused),
                ([522, 7, 24], Fused),
                ([2, 24, 8], Fused),
                ([6, 24, 9], Unfused),
            ],
            false => &[
                ([8192, 4096, 2048], Fused),
                ([4098, 1001, 520], Fused),
                ([2, 24, 8], Fused),
                ([6, 24, 9], Unfused),
            ],
        };
        check_products(rank, Fused, fused, 7, 1)?;
        check_products(rank, Unfused, &[([512, 24, 72], Unfused), ([6, 7, 9], Unfused)], 8, 1)
    });
}

#[test]
fn each_rank_gets_its_product_with_the_rows_of_four() {
    small_gpus(4).run("each_rank_gets_its_product_with_the_rows_of_four", |rank| {
        let shapes: &[_] = match rank.is_simulated() {
            true => &[([1024, 24, 40], Fused), ([300, 264, 16], Fused), ([4, 8, 8], Fused)],
            false => &[([8192, 4096, 2048], Fused), ([4100, 1001, 520], Fused)],
        };
        check_products(rank, Fused, shapes, 3, 1)
    });
}

#[test]
fn each_rank_gets_its_product_with_the_rows_of_eight() {
    small_gpus(8).run("each_rank_gets_its_product_with_the_rows_of_eight", |rank| {
        let shape = if rank.is_simulated() { [520, 8, 16] } else { [8192, 4096, 1024] };
        check_products(rank, Fused, &[(shape, Fused)], 5, 2)
    });
}

/// Each rank adds a bias and a residual of its own, first without an activation, where C is exact
/// but for one rounding, and then after the activation SiLU.
#[test]
fn every_plan_adds_bias_and_residual_after_an_activation() {
    small_gpus(2).run("every_plan_adds_bias_and_residual_after_an_activation", |rank| {
        let shape = if rank.is_simulated() { [260, 264, 24] } else { [4100, 1032, 1000] };
        let ([m, n, _], comm) = (shape, rank.communicator()?);
        for (seed, plan) in [(1, Fused), (2, Unfused)] {
            let (stream, sets) = (rank.stream()?, [Set::new(rank, shape, seed)?]);
            // SAFETY: `Set::new` has written B, and nothing writes it later.
            let product = unsafe { product(rank, &stream, &sets, plan)?.with_constant_b() };
            let [Set { problem, a, b, c }] = &sets;
            // The numbers are multiples of 1/8 from -1 to 1, others on each rank.
            let numbers =
                |m, k, seed| Problem { m, n: 1, k, seed }.factor::<bf16>(Factor::A, rank.rank());
            let (bias, residual) = (numbers(1, n, 6), numbers(m, n, 7));
            let (bias_on_gpu, residual_on_gpu) =
                (comm.mem_alloc::<bf16>(n)?, comm.mem_alloc::<bf16>(m * n)?);
            bias_on_gpu.copy_from_host(&bias)?;
            residual_on_gpu.copy_from_host(&residual)?;
            let samples: Vec<_> = problem.samples(SAMPLES).collect();
            let require = |right: &dyn Fn(f64, usize, usize) -> f64, error: f64| {
                let mut got = vec![bf16::NAN; m * n];
                c.copy_to_host(&mut got)?;
                for &(row, column) in &samples {
                    let right = right(problem.exact(0..1, row, column), row, column);
                    let got = got[row * n + column].to_f64();
                    let most = error * right.abs().max(1.0);
                    assert!(
                        (got - right).abs() <= most,
                        "{plan}, ({row}, {column}): {got} {right}"
                    );
                }
                Ok::<_, Error>(())
            };
            rank.barrier()?;
            let sum = |x: f64, row: usize, column: usize| {
                let exact = x + bias[column].to_f64() + residual[row * n + column].to_f64();
                bf16::from_f32(exact as f32).to_f64()
            };
            // The residual is C itself, which the product overwrites.
            c.copy_from_host(&residual)?;
            product.product(shape).bias(&bias_on_gpu).residual(c).launch(a, b, c)?;
            stream.synchronize()?;
            require(&sum, 0.0)?;
            let silu = |x: f64| x / (1.0 + (-x).exp());
            let activated = |x: f64, row: usize, column: usize| {
                silu(x + bias[column].to_f64()) + residual[row * n + column].to_f64()
            };
            let with_all = product.product(shape).bias(&bias_on_gpu).residual(&residual_on_gpu);
            with_all.activation(Activation::Silu).launch(a, b, c)?;
            stream.synchronize()?;
            // The bound is half of the distance from 1 to the next bf16.
            require(&activated, 1.0 / 256.0)?;
            let short = product.product(shape).bias(&bias_on_gpu.slice(1..)?).launch(a, b, c);
            let error = short.unwrap_err().to_string();
            assert!(error.contains("the bias has"), "{error}");
        }
        rank.barrier()
    });
}

/// The two banks, into which peers store rows of A, take turns, and each launch has another A.
#[test]
fn launches_follow_each_other_without_a_reset() {
    small_gpus(2).run("launches_follow_each_other_without_a_reset", |rank| {
        let (launches, shapes): (_, &[_]) = match rank.is_simulated() {
            true => (2, &[([260, 8, 24], Fused), ([256, 8, 40], Fused), ([260, 8, 24], Fused)]),
            false => (50, &[([4096, 512, 1024], Fused); 3]),
        };
        check_products(rank, Fused, shapes, 9, launches)
    });
}

#[test]
fn products_are_right_in_any_order_of_threads() {
    let name = "products_are_right_in_any_order_of_threads";
    small_gpus(2).run_seeds(name, 0..3, |rank, seed| {
        check_products(rank, Fused, &[([264, 16, 16], Fused); 2], 10 * seed, 2)
    });
}

/// One rank has many columns and still reads rows while the other rank is in its next launch.
#[test]
fn a_rank_in_its_next_launch_overwrites_no_rows_that_are_read() {
    let name = "a_rank_in_its_next_launch_overwrites_no_rows_that_are_read";
    for lag in [None, Some(Lag::Rank)] {
        let gpus = Simulation::new(2).multiprocessors(2);
        let gpus = lag.map_or(gpus.clone(), |lag| gpus.lag(lag));
        Gpus::from(gpus).run_seeds(name, 0..2, |rank, seed| {
            let (m, few, many, k) = match rank.is_simulated() {
                true => (256, 8, 520, 16),
                false => (4096, 256, 8192, 2048),
            };
            let is_slow = rank.rank() as u64 == seed % 2;
            let shape = [m, if is_slow { many } else { few }, k];
            check_products(rank, Fused, &[(shape, Fused); 4], 20 + seed, 1)
        });
    }
}

/// A copy in the graph writes A before each product.
#[test]
fn graphs_are_replayed_with_new_rows() {
    small_gpus(2).run("graphs_are_replayed_with_new_rows", |rank| {
        let shape = if rank.is_simulated() { [256, 8, 24] } else { [4096, 1024, 1024] };
        let sets = [Set::new(rank, shape, 1)?, Set::new(rank, shape, 2)?];
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let product = product(rank, &stream, &sets, Fused)?;
        let a = comm.mem_alloc(sets[0].a.len())?;
        let graph = stream.capture(|| {
            for set in &sets {
                stream.copy(&set.a, &a)?;
                product.launch(&a, &set.b, &set.c, shape)?;
            }
            Ok::<_, Error>(())
        })?;
        for _ in 0..3 {
            sets.iter().try_for_each(Set::poison)?;
            graph.launch(&stream)?;
            stream.synchronize()?;
            sets.iter().try_for_each(|set| set.check(rank))?;
        }
        rank.barrier()
    });
}

/// A measurement chooses a plan, the same one on all ranks, although the ranks have different
/// numbers of columns.
#[test]
fn a_measurement_decides_on_all_ranks_alike() {
    small_gpus(2).run("a_measurement_decides_on_all_ranks_alike", |rank| {
        let [m, n, k] = if rank.is_simulated() { [4, 8, 16] } else { [8192, 4096, 1024] };
        let shape = [m, n * (1 + rank.rank()), k];
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (comm.mem_alloc::<bf16>(m / 2 * k)?, comm.mem_alloc::<bf16>(2 * n * k)?);
        stream.fill(&a, bf16::ONE)?;
        stream.fill(&b, bf16::ONE)?;
        let c = comm.mem_alloc::<bf16>(m * shape[1])?;
        let product = AllGatherGemm::new(comm, &stream, m, k)?;
        // B begins at a multiple of 16 bytes on rank 1 only: on rank 0 the fused kernel does not
        // take its address, so both ranks must choose the other plan.
        let from = 1 - rank.rank();
        let (unaligned, few) = (b.device_slice().slice(from..from + 2 * k)?, [m, 2, k]);
        assert_eq!(product.measure(&a, &unaligned, &c, few)?, Unfused);
        let plan = product.measure(&a, &b, &c, shape)?;
        assert_eq!(product.explain(shape)?.to_string(), format!("{plan}, as it was measured"));
        let all = comm.host_all_gather(plan.to_string().as_bytes())?;
        assert_eq!(all[0], all[1]);
        product.set_plan(Some(Unfused))?;
        assert_eq!(product.explain(shape)?.to_string(), "unfused, as it was set");
        product.set_plan(None)?;
        // The measured plan holds for these rows and terms, with any number of columns.
        assert_eq!(product.explain([m, n + 8, k])?.plan, plan);
        // Another number of terms on one rank is an error on all.
        let other = [m, n, if rank.rank() == 0 { k } else { k - 8 }];
        let error = product.measure(&a, &b, &c, other).unwrap_err().to_string();
        assert!(error.contains("AllGatherGemm::measure: k is "), "{error}");
        c.fill_bytes(0xff)?;
        product.launch(&a, &b, &c, shape)?;
        stream.synchronize()?;
        let mut got = vec![bf16::NAN; c.len()];
        c.copy_to_host(&mut got)?;
        assert!(got.iter().all(|sum| *sum == bf16::from_f32(k as f32)));
        Ok(())
    });
}

#[test]
fn bad_input_is_refused_with_the_reason() {
    on_gpus("bad_input_is_refused_with_the_reason", 1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (comm.mem_alloc::<bf16>(64 * 64)?, comm.mem_alloc::<bf16>(64 * 64)?);
        let c = comm.mem_alloc::<bf16>(300)?;
        let product = AllGatherGemm::new(comm, &stream, 64, 64)?;
        for (shape, reason) in [
            ([64, 0, 8], "nothing to do"),
            ([4, 64, 65], "B has 4096 elements"),
            ([64, 64, 8], "C has 300 elements"),
            ([64, 64, 65], "larger workspace"),
            ([65, 64, 8], "larger workspace"),
        ] {
            let error = product.launch(&a, &b, &c, shape).err().map(|e| e.to_string());
            assert!(error.as_ref().is_some_and(|e| e.contains(reason)), "{shape:?}: {error:?}");
        }
        let few = a.slice(..100)?;
        let error = product.launch(&few, &b, &c, [4, 8, 64]).unwrap_err().to_string();
        assert!(error.contains("A has 100 elements"), "{error}");
        // `AllGatherGemm::new` prepares the fused kernel only if the largest A has many rows. Here
        // `set_plan` prepares it.
        assert_eq!(product.explain([64; 3])?.to_string(), "unfused, as no kernel was prepared");
        product.launch(&a, &b, &c, [4, 64, 64])?;
        product.set_plan(Some(Fused))?;
        assert_eq!(product.explain([64; 3])?.to_string(), "fused, as it was set");
        assert_eq!(product.explain([4, 4, 9])?.to_string(), "unfused, as k is no multiple of 8");
        product.launch(&a, &b, &c, [4, 64, 64])?;
        let error = product.launch(&a.slice(1..)?, &b, &c, [4, 64, 64]).unwrap_err().to_string();
        assert!(error.contains("multiples of 16 bytes"), "{error}");
        stream.synchronize()
    });
}

#[test]
fn rows_that_ranks_cannot_share_are_refused() {
    on_gpus("rows_that_ranks_cannot_share_are_refused", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let a = comm.mem_alloc::<bf16>(64)?;
        let product = AllGatherGemm::new(comm, &stream, 8, 8)?;
        let error = product.launch(&a, &a, &a, [7, 8, 8]).unwrap_err().to_string();
        assert!(error.contains("m is 7, and no multiple of the 2 ranks"), "{error}");
        Ok(())
    });
}
