//! Tests of the matrix product on one GPU.

use devcomm::{Error, Gemm, Rank, StateError};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::machines::on_gpus;
use half::bf16;

/// Elements of a large product on GPUs that are checked. Small and simulated products are checked
/// in full.
const SAMPLES: usize = 4096;

/// Shapes of less than a tile, of whole tiles, and of a part of a tile more, with one step of the
/// pipeline and with more steps than stages.
fn shapes(rank: &Rank) -> Vec<[usize; 3]> {
    if rank.is_simulated() {
        return vec![[1, 8, 8], [130, 264, 72], [256, 256, 64], [300, 520, 328]];
    }
    let columns = |m| [8, 256, 264, 1000, 4096].map(|n| (m, n));
    let sizes = [1, 128, 129, 257, 1000].into_iter().flat_map(columns);
    let mixed = sizes.flat_map(|(m, n)| [8, 64, 72, 1000].map(|k| [m, n, k]));
    // More tiles than blocks.
    mixed.chain([[4096, 4096, 256], [5000, 6008, 1096]]).collect()
}

#[test]
fn every_element_is_the_rounded_sum() {
    on_gpus("every_element_is_the_rounded_sum", 1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let gemm = Gemm::new(&stream)?;
        for [m, n, k] in shapes(rank) {
            let problem = Problem { m, n, k, seed: 3 };
            let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
            // One row more, which stays as it is.
            let c = comm.mem_alloc::<bf16>((m + 1) * n)?;
            a.copy_from_host(&problem.factor(Factor::A, 0))?;
            b.copy_from_host(&problem.factor(Factor::B, 0))?;
            c.fill_bytes(0xff)?;
            gemm.launch(&a, &b, &c, [m, n, k])?;
            stream.synchronize()?;
            let mut got = vec![bf16::ZERO; c.len()];
            c.copy_to_host(&mut got)?;
            assert!(got[m * n..].iter().all(|x| x.is_nan()), "{problem:?} wrote behind C");
            let wrong = match rank.is_simulated() || m * n <= 16 * SAMPLES {
                true => problem.count_wrong(0..1, &got, problem.all()),
                false => problem.count_wrong(0..1, &got, problem.samples(SAMPLES)),
            };
            assert_eq!(wrong, 0, "{problem:?}");
        }
        Ok(())
    });
}

#[test]
fn bad_products_are_refused_with_the_reason() {
    on_gpus("bad_products_are_refused_with_the_reason", 1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let gemm = Gemm::new(&stream)?;
        let buffer = comm.mem_alloc::<bf16>(64 * 64)?;
        for (shape, reason) in [
            ([64, 64, 12], "k is 12"),
            ([64, 12, 64], "n is 12"),
            ([64, 0, 8], "nothing to do"),
            ([65, 64, 64], "A has 4096 elements"),
            ([64, 72, 64], "B has 4096 elements"),
            ([512, 512, 8], "C has 4096 elements"),
        ] {
            let error = gemm.launch(&buffer, &buffer, &buffer, shape).err().map(|e| e.to_string());
            assert!(error.as_ref().is_some_and(|e| e.contains(reason)), "{shape:?}: {error:?}");
        }
        let graph = stream.capture(|| gemm.launch(&buffer, &buffer, &buffer, [64, 64, 64]));
        assert!(matches!(graph, Err(Error::State(StateError::Capturing { .. }))), "{graph:?}");
        Ok(())
    });
}
