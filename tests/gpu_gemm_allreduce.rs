//! The fused product and all-reduce on GPUs, ranks as threads.

mod gpu;
#[path = "../examples/gemm_allreduce/problem.rs"]
#[allow(dead_code, reason = "the example uses all of it")]
mod problem;

use devcomm::kernels::GemmForm;
use devcomm::{Error, GemmAllReduce, GemmOutput, KERNELS, Rank};
use gpu::{on_gpus, with_gpus};
use half::bf16;
use problem::{Factor, Problem};

/// Below a fragment, across tiles, ragged on all sides; pitches that are odd, even, and whole vectors.
const ROWS: [usize; 4] = [1, 7, 128, 1000];
const COLUMNS: [usize; 5] = [1, 7, 64, 1000, 4096];
const TERMS: [usize; 3] = [8, 64, 1000];
/// Elements of a product that are compared with the reference; small products entirely.
const SAMPLES: usize = 512;

/// Both where the GPU has both.
fn forms(rank: &Rank) -> &'static [GemmForm] {
    match rank.context().limits().compute_capability {
        (9, 0) => &[GemmForm::Wgmma, GemmForm::Mma],
        _ => &[GemmForm::Mma],
    }
}

fn count_wrong(problem: Problem, ranks: std::ops::Range<usize>, c: &[bf16]) -> usize {
    if c.len() <= SAMPLES * 16 {
        problem.count_wrong(ranks, c, problem.all())
    } else {
        problem.count_wrong(ranks, c, problem.samples(SAMPLES))
    }
}

fn is_right_for_mixed_shapes(name: &str, ranks: usize) {
    on_gpus(name, ranks, |rank| {
        let comm = rank.communicator()?;
        let (compiled, stream) = (rank.load(&KERNELS)?, rank.stream()?);
        let (m, n, k) = (1000, 4096, 1000);
        let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
        let c = GemmOutput::new(rank, comm, m * n)?;
        for &form in forms(rank) {
            let gemm = GemmAllReduce::with_form(rank, comm, &compiled, &stream, form, m, n)?;
            let shapes = ROWS.iter().flat_map(|&m| COLUMNS.map(|n| (m, n)));
            for (m, n, k) in shapes.flat_map(|(m, n)| TERMS.map(|k| (m, n, k))) {
                let problem = Problem { m, n, k, seed: 7 };
                a.copy_from_host(&problem.factor(Factor::A, rank.rank()))?;
                b.copy_from_host(&problem.factor(Factor::B, rank.rank()))?;
                let mut result = vec![bf16::NAN; m * n];
                for alone in [true, false] {
                    // An element that nobody writes stays a NaN.
                    c.fill(0xff)?;
                    rank.barrier()?;
                    let me = rank.rank();
                    let summed = if alone {
                        gemm.launch_alone(&a, &b, &c, [m, n, k])?;
                        me..me + 1
                    } else {
                        gemm.launch(&a, &b, &c, [m, n, k])?;
                        0..ranks
                    };
                    stream.synchronize()?;
                    c.copy_to_host(&mut result)?;
                    let wrong = count_wrong(problem, summed, &result);
                    assert_eq!(wrong, 0, "{form:?}, {problem:?}, alone: {alone}, rank {me}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn is_right_on_one_gpu() {
    is_right_for_mixed_shapes("is_right_on_one_gpu", 1);
}

#[test]
fn is_right_on_two_gpus() {
    is_right_for_mixed_shapes("is_right_on_two_gpus", 2);
}

#[test]
fn is_right_on_three_gpus() {
    is_right_for_mixed_shapes("is_right_on_three_gpus", 3);
}

#[test]
fn is_right_on_four_gpus() {
    is_right_for_mixed_shapes("is_right_on_four_gpus", 4);
}

/// Launches that follow each other in a stream, without the host in between, and shapes that take turns: the flags' epoch goes on.
#[test]
fn many_launches_need_no_reset() {
    on_gpus("many_launches_need_no_reset", 2, |rank| {
        const LAUNCHES: usize = 50;
        let comm = rank.communicator()?;
        let (compiled, stream) = (rank.load(&KERNELS)?, rank.stream()?);
        let problems = [(1000, 520, 64), (64, 33, 8)].map(|(m, n, k)| Problem { m, n, k, seed: 9 });
        for &form in forms(rank) {
            let gemm = GemmAllReduce::with_form(rank, comm, &compiled, &stream, form, 1000, 520)?;
            let mut sets = Vec::new();
            for problem in problems {
                let Problem { m, n, k, .. } = problem;
                let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
                a.copy_from_host(&problem.factor(Factor::A, rank.rank()))?;
                b.copy_from_host(&problem.factor(Factor::B, rank.rank()))?;
                let c = GemmOutput::new(rank, comm, m * n)?;
                c.fill(0xff)?;
                sets.push((a, b, c));
            }
            rank.barrier()?;
            for _ in 0..LAUNCHES {
                for (Problem { m, n, k, .. }, (a, b, c)) in problems.iter().zip(&sets) {
                    gemm.launch(a, b, c, [*m, *n, *k])?;
                }
            }
            stream.synchronize()?;
            for (problem, (_, _, c)) in problems.iter().zip(&sets) {
                let mut result = vec![bf16::NAN; problem.m * problem.n];
                c.copy_to_host(&mut result)?;
                assert_eq!(count_wrong(*problem, 0..2, &result), 0, "{form:?}, {problem:?}");
            }
        }
        Ok(())
    });
}

/// Nothing is launched for an input that the kernel cannot do, and the same object goes on to do what it can.
#[test]
fn bad_input_is_refused_with_the_reason() {
    with_gpus("bad_input_is_refused_with_the_reason", 1, |world| {
        let refused = world.run(|rank| {
            let comm = rank.communicator()?;
            let (compiled, stream) = (rank.load(&KERNELS)?, rank.stream()?);
            let (a, b) = (comm.mem_alloc::<bf16>(64 * 64)?, comm.mem_alloc::<bf16>(64 * 64)?);
            let c = GemmOutput::new(rank, comm, 300 * 300)?;
            let made = |m, n| GemmAllReduce::new(rank, comm, &compiled, &stream, m, n);
            let gemm = made(64, 64)?;
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
            let graph = stream.capture(|| gemm.launch(&a, &b, &c, [64, 64, 64]));
            assert!(matches!(graph, Err(Error::Capturing { .. })));
            assert!(made(0, 64).is_err() && made(usize::MAX, 64).is_err());
            gemm.launch(&a, &b, &c, [64, 64, 64])?;
            stream.synchronize()?;
            Ok::<_, Error>(())
        });
        refused.unwrap();
    });
}
