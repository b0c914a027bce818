//! A test of a product with a custom epilogue.

use cuda_std::{bf16, f16};
use devcomm::kernels::gemm::gemm_mma::{SHARED, THREADS};
use devcomm::{LaunchConfig, Simulation};
use devcomm_device_tests::KERNELS;
use devcomm_device_tests::kernels::{self, epilogue::ScaledReluArgs};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::machines::Gpus;
use devcomm_testing::numbers::Number;

#[test]
fn a_kernel_with_an_epilogue_of_its_own_applies_it() {
    let name = "a_kernel_with_an_epilogue_of_its_own_applies_it";
    Gpus::from(Simulation::new(1)).with_kernels(&KERNELS).run(name, |rank| {
        rank.load(&KERNELS)?;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        // There are two tiles, which have rows and columns outside C.
        let problem = Problem { m: 37, n: 131, k: 40, seed: 3 };
        let Problem { m, n, k, .. } = problem;
        let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
        let (c, rows) = (comm.mem_alloc::<f16>(m * n)?, comm.mem_alloc::<f32>(m)?);
        a.copy_from_host(&problem.factor(Factor::A, 0))?;
        b.copy_from_host(&problem.factor(Factor::B, 0))?;
        let numbers: Vec<f32> = (0..m).map(|row| row as f32 / 4.0 - 3.0).collect();
        rows.copy_from_host(&numbers)?;
        let [rows_of_c, columns, terms] = problem.shape().map(|extent| extent as u32);
        let product = kernels::product_of_ones_own::args(
            &a,
            &b,
            &c,
            rows_of_c,
            columns,
            terms,
            ScaledReluArgs { rows: &rows },
        );
        let config = LaunchConfig::new(2, THREADS).with_dynamic_shared(SHARED);
        // SAFETY: the matrices have the sizes of the shape, and `rows` a number for each row of C.
        unsafe { product.config(config).launch(&stream)? };
        stream.synchronize()?;
        let mut got = vec![f16::ZERO; m * n];
        c.copy_to_host(&mut got)?;
        for (row, column) in problem.all() {
            let sum = problem.exact(0..1, row, column) as f32;
            let right = f16::nearest(sum.max(0.0) * numbers[row]);
            assert_eq!(got[row * n + column], right, "{row}, {column}");
        }
        Ok(())
    });
}
