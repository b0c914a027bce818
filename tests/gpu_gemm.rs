//! Tests of the matrix product on one GPU.

use devcomm::kernels::gemm::epilogue::FusedArgs;
use devcomm::kernels::{self, gemm::gemm_mma as sizes};
use devcomm::{
    Activation, Buffer, DeviceSlice, Element, F8E4M3, F8E5M2, Gemm, GemmElement, GemmOutput,
    GemmPlan, KERNELS, LaunchConfig, Product, Rank, Result, ScaledElement, Simulation, Tiling,
};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::machines::{Gpus, on_gpus};
use devcomm_testing::numbers::Number;
use half::{bf16, f16};

/// Elements of a large product on GPUs that are checked. Small and simulated products are checked
/// in full.
const SAMPLES: usize = 4096;

/// Returns shapes smaller than a tile, of whole tiles, and of whole tiles and a part, with one step
/// of the pipeline and with more steps than stages.
fn shapes(rank: &Rank) -> Vec<[usize; 3]> {
    if rank.is_simulated() {
        // The last three have rows that are aligned to 2 and to 4 bytes.
        let aligned = [[1, 8, 8], [130, 264, 72], [256, 256, 64], [300, 520, 328]];
        return [aligned.as_slice(), &[[1, 1, 1], [7, 9, 5], [130, 127, 34]]].concat();
    }
    let columns = |m| [8, 256, 264, 1000, 4096].map(|n| (m, n));
    let sizes = [1, 128, 129, 257, 1000].into_iter().flat_map(columns);
    let mixed = sizes.flat_map(|(m, n)| [8, 64, 72, 1000].map(|k| [m, n, k]));
    // More tiles than blocks; then rows that are not aligned.
    let large = [[4096, 4096, 256], [5000, 6008, 1096]];
    let odd = [[1, 1, 1], [7, 9, 5], [128, 130, 8], [1000, 1001, 1002], [2000, 3001, 1001]];
    mixed.chain(large).chain(odd).collect()
}

/// Returns shapes for the portable kernel: less than a step of its pipeline, fewer steps than
/// stages, and more; rows of A and B that are aligned to 16 bytes, to 4 and to 2; C of odd width.
fn portable_shapes(rank: &Rank) -> Vec<[usize; 3]> {
    let small = [[1, 1, 1], [7, 9, 5], [16, 8, 16], [65, 66, 40], [130, 127, 33], [129, 264, 72]];
    let deep = [[20, 30, 200], [20, 31, 202], [21, 30, 203]];
    let shapes = [small.as_slice(), &deep].concat();
    if rank.is_simulated() {
        return shapes;
    }
    let columns = |m| [127, 128, 1000, 1001].map(|n| (m, n));
    let sizes = [1, 128, 129, 1000].into_iter().flat_map(columns);
    let mixed = sizes.flat_map(|(m, n)| [8, 31, 32, 34, 1000, 1001, 1002].map(|k| [m, n, k]));
    // More tiles than blocks that are resident.
    let large = [[5000, 6000, 1096], [5000, 6001, 1098], [3001, 4001, 515]];
    shapes.into_iter().chain(mixed).chain(large).collect()
}

/// Matrices of a product on a GPU, and elements of the right C.
struct PreparedProduct<T: GemmElement> {
    problem: Problem,
    a: DeviceSlice<T>,
    b: DeviceSlice<T>,
    /// One row more than C, which no product writes.
    c: DeviceSlice<T::Output>,
    /// Elements of C by their index: all, or samples of a large one.
    right: Vec<(usize, T::Output)>,
}

impl<T: GemmElement<Output: Number> + Number> PreparedProduct<T> {
    /// Makes matrices for a product that multiplies its sums by `scale`. `skip` elements lie before
    /// each matrix.
    fn new(rank: &Rank, [m, n, k]: [usize; 3], skip: usize, scale: f32) -> Result<Self> {
        let (comm, problem) = (rank.communicator()?, Problem { m, n, k, seed: 3 });
        let matrix = |len: usize| comm.mem_alloc::<T>(skip + len)?.slice(skip..);
        let (a, b) = (matrix(m * k)?, matrix(n * k)?);
        a.copy_from_host(&problem.factor(Factor::A, 0))?;
        b.copy_from_host(&problem.factor(Factor::B, 0))?;
        let c = comm.mem_alloc::<T::Output>(skip + (m + 1) * n)?.slice(skip..)?;
        let exact = |(row, column)| {
            let sum = problem.exact(0..1, row, column) as f32;
            (row * n + column, T::Output::nearest(sum * scale))
        };
        let right = match rank.is_simulated() || m * n <= 16 * SAMPLES {
            true => problem.all().map(exact).collect(),
            false => problem.samples(SAMPLES).map(exact).collect(),
        };
        Ok(Self { problem, a, b, c, right })
    }

    /// Runs `product` with a C whose bits are all set, and checks its elements, and that the row
    /// after it is as it was.
    fn check(
        &self,
        product: impl Fn(&DeviceSlice<T>, &DeviceSlice<T>, &DeviceSlice<T::Output>) -> Result<()>,
    ) -> Result<()> {
        let Self { problem, a, b, c, right } = self;
        let n = problem.n;
        c.fill_bytes(0xff)?;
        product(a, b, c)?;
        let mut got = vec![T::Output::nearest(0.0); c.len()];
        c.copy_to_host(&mut got)?;
        let rest = &got[problem.m * n..];
        assert!(rest.iter().all(|x| x.value().is_nan()), "{problem:?} wrote past C");
        let wrong = right.iter().filter(|&&(i, right)| got[i] != right).map(|&(i, right)| {
            format!("row {}, column {}: {:?}, not {right:?}", i / n, i % n, got[i])
        });
        let wrong: Vec<String> = wrong.collect();
        let first = &wrong[..wrong.len().min(8)];
        assert!(wrong.is_empty(), "{problem:?}: {} are wrong: {first:#?}", wrong.len());
        Ok(())
    }
}

/// Checks one product.
fn check<T: GemmElement<Output: Number> + Number>(
    rank: &Rank,
    shape: [usize; 3],
    skip: usize,
    product: impl Fn(&DeviceSlice<T>, &DeviceSlice<T>, &DeviceSlice<T::Output>) -> Result<()>,
) -> Result<()> {
    PreparedProduct::new(rank, shape, skip, 1.0)?.check(product)
}

#[test]
fn every_element_is_the_rounded_sum() {
    on_gpus("every_element_is_the_rounded_sum", 1, |rank| {
        let stream = rank.stream()?;
        let gemm = Gemm::new(&stream)?;
        let shapes = shapes(rank).into_iter().map(|shape| (shape, 0));
        // The last shapes have memory that is aligned to 2 bytes, and to 4.
        for (shape, skip) in shapes.chain([([30, 40, 24], 1), ([30, 40, 24], 2)]) {
            check::<bf16>(rank, shape, skip, |a, b, c| {
                gemm.launch(a, b, c, shape)?;
                stream.synchronize()
            })?;
        }
        Ok(())
    });
}

/// Returns shapes for each plan: fewer rows than a tile has, and more; a last round that is split,
/// also with fewer steps than blocks of a cluster; C of odd width; terms for slices.
fn planned_shapes(rank: &Rank) -> Vec<[usize; 3]> {
    if rank.is_simulated() {
        return vec![[1, 8, 8], [9, 72, 200], [130, 264, 72], [140, 129, 64], [133, 104, 1544]];
    }
    let few =
        [[1, 4096, 4096], [16, 8192, 1024], [64, 28672, 256], [200, 8200, 520], [1, 17000, 8]];
    let many = [
        [513, 8192, 3584],
        [1000, 1000, 1000],
        [1030, 4095, 1032],
        [300, 16384, 72],
        [1030, 392, 3080],
    ];
    [few, many].concat()
}

#[test]
fn every_plan_multiplies() {
    on_gpus("every_plan_multiplies", 1, |rank| {
        let stream = rank.stream()?;
        // SAFETY: no kernel writes B.
        let gemms = [Gemm::new(&stream)?, unsafe { Gemm::new(&stream)?.with_constant_b() }];
        for shape in planned_shapes(rank) {
            let matrices = PreparedProduct::<bf16>::new(rank, shape, 0, 1.0)?;
            for (i, plan) in gemms[0].plans(shape)?.into_iter().enumerate() {
                // On simulated GPUs every other plan has a constant B.
                let tried = if rank.is_simulated() { &gemms[i % 2..][..1] } else { &gemms[..] };
                for gemm in tried {
                    gemm.set_plan(shape, plan)?;
                    assert_eq!(gemm.plan(shape)?, plan);
                    matrices
                        .check(|a, b, c| {
                            gemm.launch(a, b, c, shape)?;
                            stream.synchronize()
                        })
                        .inspect_err(|error| println!("{plan} of {shape:?}: {error}"))?;
                }
            }
        }
        Ok(())
    });
}

/// Returns shapes for f16 and 8-bit floats: a part of a step of the pipeline, and more steps than
/// stages; C of odd width. With more terms Hopper would round the sums of 8-bit floats.
fn typed_shapes(rank: &Rank) -> Vec<[usize; 3]> {
    if rank.is_simulated() {
        return vec![[1, 8, 16], [130, 264, 144], [140, 129, 48], [9, 72, 560]];
    }
    let small = [[1, 4096, 2048], [128, 256, 128], [300, 16384, 80], [130, 127, 48]];
    let large = [[513, 8192, 1024], [1000, 1000, 1008], [1030, 4095, 1040], [4096, 4096, 256]];
    [small, large].concat()
}

/// Checks products of `T`, of these shapes too.
fn multiplies<T: GemmElement<Output: Number> + Number>(
    rank: &Rank,
    more: &[[usize; 3]],
) -> Result<()> {
    let stream = rank.stream()?;
    let gemm = Gemm::new(&stream)?;
    for shape in [&typed_shapes(rank), more].concat() {
        check::<T>(rank, shape, 0, |a, b, c| {
            gemm.launch(a, b, c, shape)?;
            stream.synchronize()
        })?;
    }
    Ok(())
}

/// Checks products of `T` whose sums are scaled.
fn multiplies_scaled<T>(rank: &Rank) -> Result<()>
where
    T: ScaledElement<Output: Number> + Number,
    f32: GemmOutput<T>,
{
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let gemm = Gemm::new(&stream)?;
    let scales = [comm.mem_alloc::<f32>(1)?, comm.mem_alloc::<f32>(1)?];
    // Their product is 3.
    scales[0].copy_from_host(&[0.375])?;
    scales[1].copy_from_host(&[8.0])?;
    for shape in typed_shapes(rank) {
        PreparedProduct::<T>::new(rank, shape, 0, 3.0)?.check(|a, b, c| {
            gemm.product(shape).scales(scales.each_ref()).launch(a, b, c)?;
            stream.synchronize()
        })?;
    }
    let shape = [130, 136, 48];
    let product = gemm.product::<T, T::Output>(shape).scales(scales.each_ref());
    check_fused(rank, product, shape, 0, 3.0, ALL)?;
    let product = gemm.product::<T, f32>(shape).scales(scales.each_ref());
    check_fused(rank, product, shape, 0, 3.0, IN_PLACE)
}

/// What is added to a product.
#[derive(Clone, Copy, Debug, Default)]
struct Parts {
    bias: bool,
    activation: Option<Activation>,
    residual: bool,
    /// The residual is C.
    in_place: bool,
}

const ALL: Parts =
    Parts { bias: true, activation: Some(Activation::Gelu), residual: true, in_place: false };
const SILU: Parts =
    Parts { bias: false, activation: Some(Activation::Silu), residual: false, in_place: false };
const IN_PLACE: Parts = Parts { bias: true, activation: None, residual: true, in_place: true };

/// Returns the activation of `x`.
fn activation(activation: Option<Activation>, x: f64) -> f64 {
    match activation {
        Some(Activation::Gelu) => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        Some(Activation::Silu) => x / (1.0 + (-x).exp()),
        _ => x,
    }
}

/// Adds these parts to a product, whose sums are multiplied by `scale`, and checks all elements.
/// `skip` elements lie before C, bias and residual.
fn check_fused<T, O>(
    rank: &Rank,
    mut product: Product<'_, T, O>,
    [m, n, k]: [usize; 3],
    skip: usize,
    scale: f64,
    parts: Parts,
) -> Result<()>
where
    T: GemmElement + Number,
    O: GemmOutput<T> + Number,
{
    let (comm, problem) = (rank.communicator()?, Problem { m, n, k, seed: 5 });
    let (a, b) = (comm.mem_alloc::<T>(m * k)?, comm.mem_alloc::<T>(n * k)?);
    a.copy_from_host(&problem.factor(Factor::A, 0))?;
    b.copy_from_host(&problem.factor(Factor::B, 0))?;
    // The numbers are multiples of 1/8.
    let numbers = |m, k, seed| Problem { m, n: 1, k, seed }.factor::<O>(Factor::A, 0);
    let (bias, residual) = (numbers(1, n, 6), numbers(m, n, 7));
    let buffer = |len: usize| comm.mem_alloc::<O>(skip + len)?.slice(skip..);
    let (bias_buffer, residual_buffer, c) = (buffer(n)?, buffer(m * n)?, buffer((m + 1) * n)?);
    bias_buffer.copy_from_host(&bias)?;
    residual_buffer.copy_from_host(&residual)?;
    c.fill_bytes(0xff)?;
    if parts.bias {
        product = product.bias(&bias_buffer);
    }
    if let Some(activation) = parts.activation {
        product = product.activation(activation);
    }
    if parts.in_place {
        c.slice(..m * n)?.copy_from_host(&residual)?;
        product = product.residual(&c);
    } else if parts.residual {
        product = product.residual(&residual_buffer);
    }
    product.launch(&a, &b, &c)?;
    rank.stream()?.synchronize()?;
    let mut got = vec![O::nearest(0.0); c.len()];
    c.copy_to_host(&mut got)?;
    assert!(got[m * n..].iter().all(|x| x.value().is_nan()), "{problem:?} wrote past C");
    let is_wrong = |&(row, column): &(usize, usize)| {
        let (got, at) = (got[row * n + column], row * n + column);
        let sum = scale * problem.exact(0..1, row, column);
        let x = sum + if parts.bias { bias[column].value() } else { 0.0 };
        let right = activation(parts.activation, x);
        let right = right + if parts.residual { residual[at].value() } else { 0.0 };
        if parts.activation.is_none() {
            // `f32` holds it exactly.
            return got != O::nearest(right as f32);
        }
        let approximation = x.abs().max(1.0) / f64::from(1 << 20);
        let rounding = O::EPSILON / 2.0 * (right.abs() + approximation);
        let error = (got.value() - right).abs();
        error.is_nan() || error > approximation + rounding.max(O::HALF_STEP_AT_ZERO)
    };
    let wrong = problem.all().filter(is_wrong).count();
    assert_eq!(wrong, 0, "{} in {}, {problem:?}, {parts:?}", T::NAME, O::NAME);
    Ok(())
}

/// Checks a product with these parts, as [`check_fused`].
fn fused<T, O>(rank: &Rank, gemm: &Gemm, shape: [usize; 3], skip: usize, parts: Parts) -> Result<()>
where
    T: GemmElement + Number,
    O: GemmOutput<T> + Number,
{
    check_fused::<T, O>(rank, gemm.product(shape), shape, skip, 1.0, parts)
}

#[test]
fn every_plan_applies_bias_activation_and_residual() {
    on_gpus("every_plan_applies_bias_activation_and_residual", 1, |rank| {
        let gemm = Gemm::new(&rank.stream()?)?;
        // There are few rows, whole and split over two and four blocks, and C of odd width. Which
        // blocks load together makes no difference.
        let differs = |plan: &GemmPlan| match plan {
            GemmPlan::Swapped(Tiling { rows, cluster, .. }) => {
                *rows < 256 && cluster.across * cluster.down == 1
            }
            _ => true,
        };
        for shape in [[7, 72, 136], [40, 136, 264], [150, 136, 72], [130, 129, 64]] {
            for (i, plan) in gemm.plans(shape)?.into_iter().filter(differs).enumerate() {
                gemm.set_plan(shape, plan)?;
                println!("{plan} of {shape:?}");
                // On simulated GPUs the parts take turns.
                let tried = if rank.is_simulated() {
                    &[ALL, IN_PLACE][i % 2..][..1]
                } else {
                    &[ALL, IN_PLACE][..]
                };
                for parts in tried {
                    fused::<bf16, bf16>(rank, &gemm, shape, 0, *parts)?;
                }
            }
        }
        fused::<bf16, bf16>(rank, &gemm, [40, 72, 64], 1, ALL)?;
        fused::<bf16, bf16>(rank, &gemm, [40, 72, 64], 0, SILU)
    });
}

/// The sums are finite, but their squares are not, and the last one is infinite.
#[test]
fn activations_of_large_sums_are_the_sum_or_zero() {
    on_gpus("activations_of_large_sums_are_the_sum_or_zero", 1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let sums = [1e20, -1e20, f32::INFINITY].map(bf16::from_f32);
        let [m, n, k] = [sums.len(), 8, 8];
        let (a, b, c) = (comm.mem_alloc(m * k)?, comm.mem_alloc(n * k)?, comm.mem_alloc(m * n)?);
        let first_terms = |of: &dyn Fn(usize) -> bf16, rows| -> Vec<bf16> {
            (0..rows * k).map(|i| if i % k == 0 { of(i / k) } else { bf16::ZERO }).collect()
        };
        a.copy_from_host(&first_terms(&|row| sums[row], m))?;
        b.copy_from_host(&first_terms(&|_| bf16::ONE, n))?;
        for activation in [Activation::Silu, Activation::Gelu] {
            Gemm::new(&stream)?.product([m, n, k]).activation(activation).launch(&a, &b, &c)?;
            stream.synchronize()?;
            let mut got = vec![bf16::NAN; m * n];
            c.copy_to_host(&mut got)?;
            for (row, got) in got.chunks(n).enumerate() {
                let right = sums[row].max(bf16::ZERO);
                assert!(got.iter().all(|&got| got == right), "{activation:?}, {row}: {got:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn products_in_f32_and_of_f16_have_epilogues_too() {
    on_gpus("products_in_f32_and_of_f16_have_epilogues_too", 1, |rank| {
        let gemm = Gemm::new(&rank.stream()?)?;
        // Rows of C that begin at multiples of 16 bytes, of 8 and of 4; more tiles than blocks of
        // a simulated GPU; rows of A and B that only the portable kernel does.
        for (shape, parts) in [
            ([130, 268, 72], ALL),
            ([130, 130, 64], SILU),
            ([30, 127, 64], IN_PLACE),
            ([300, 520, 328], Parts::default()),
            ([70, 130, 34], ALL),
            ([7, 9, 5], IN_PLACE),
        ] {
            fused::<bf16, f32>(rank, &gemm, shape, 0, parts)?;
        }
        fused::<bf16, f32>(rank, &gemm, [30, 40, 24], 1, ALL)?;
        fused::<f16, f32>(rank, &gemm, [30, 40, 24], 0, ALL)?;
        fused::<f16, f16>(rank, &gemm, [130, 264, 72], 0, ALL)?;
        fused::<f16, f16>(rank, &gemm, [7, 9, 5], 0, ALL)
    });
}

#[test]
fn products_of_f16_are_right() {
    on_gpus("products_of_f16_are_right", 1, |rank| {
        multiplies::<f16>(rank, &[[7, 9, 5], [130, 127, 34], [30, 40, 24]])
    });
}

/// Returns whether this is a Hopper GPU.
fn is_hopper(rank: &Rank) -> Result<bool> {
    Ok(Gemm::new(&rank.stream()?)?.plans([8, 8, 8])?.contains(&GemmPlan::Wide))
}

#[test]
fn products_of_8_bit_floats_are_right_with_and_without_scales() {
    on_gpus("products_of_8_bit_floats_are_right_with_and_without_scales", 1, |rank| {
        if is_hopper(rank)? {
            multiplies::<F8E4M3>(rank, &[])?;
            multiplies_scaled::<F8E4M3>(rank)?;
            multiplies_scaled::<F8E5M2>(rank)?;
        }
        Ok(())
    });
}

#[test]
fn products_of_8_bit_floats_that_no_kernel_does_are_refused() {
    on_gpus("products_of_8_bit_floats_that_no_kernel_does_are_refused", 1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let gemm = Gemm::new(&stream)?;
        let (a, c) = (comm.mem_alloc::<F8E4M3>(4096)?, comm.mem_alloc::<bf16>(4096)?);
        let shape = [8, 8, 24];
        let odd = gemm.launch(&a, &a, &c, shape).err().map(|e| e.to_string());
        assert!(odd.as_ref().is_some_and(|e| e.contains("k is 24, pad it")), "{odd:?}");
        let scale = comm.mem_alloc::<f32>(1)?;
        let scales = [&scale.slice(..)?, &scale.slice(1..)?];
        let short = gemm.product([8, 8, 32]).scales(scales).launch(&a, &a, &c);
        let short = short.err().map(|e| e.to_string());
        let reason = "the scale of B has 0 elements";
        assert!(short.as_ref().is_some_and(|e| e.contains(reason)), "{short:?}");
        let scales = comm.mem_alloc::<f32>(16)?;
        for (shape, [len_a, len_b], reason) in [
            ([8, 8, 144], [15, 16], "the matrix of A's scales has 15 elements, but needs 2 x 8"),
            ([8, 130, 16], [16, 1], "the matrix of B's scales has 1 elements, but needs 2 x 1"),
            ([8, 8, 24], [16, 16], "k is 24, pad it"),
        ] {
            let (of_a, of_b) = (scales.slice(..len_a)?, scales.slice(..len_b)?);
            let refused = gemm.product(shape).block_scales(&of_a, &of_b).launch(&a, &a, &c);
            let refused = refused.err().map(|e| e.to_string());
            assert!(refused.as_ref().is_some_and(|e| e.contains(reason)), "{refused:?}");
        }
        let skewed = gemm.launch(&a.slice(1..)?, &a, &c, [8, 8, 32]).err().map(|e| e.to_string());
        let reason = "at multiples of 16 bytes";
        assert!(skewed.as_ref().is_some_and(|e| e.contains(reason)), "{skewed:?}");
        Ok(())
    });
}

/// Checks a product with scales per block that differ by up to 2^16, and with a bias, against sums
/// in f64.
fn multiplies_blocks<T: ScaledElement<Output: Number> + Number>(
    rank: &Rank,
    shape @ [m, n, k]: [usize; 3],
) -> Result<()> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let problem = Problem { m, n, k, seed: 5 };
    let mut random = fastrand::Rng::with_seed(6);
    let mut scales = |count| -> Vec<f32> {
        let mut scale = || (1.0 + random.f32()) * 2_f32.powi(random.i32(-8..8));
        (0..count).map(|_| scale()).collect()
    };
    let blocks = k.div_ceil(128);
    let scales = [scales(blocks * m), scales(n.div_ceil(128) * blocks)];
    let factors = [problem.factor::<T>(Factor::A, 0), problem.factor(Factor::B, 0)];
    let (a, b) = (comm.mem_alloc::<T>(m * k)?, comm.mem_alloc::<T>(n * k)?);
    let scale_a = comm.mem_alloc::<f32>(scales[0].len())?;
    let scale_b = comm.mem_alloc::<f32>(scales[1].len())?;
    let biases: Vec<T::Output> =
        (0..n).map(|j| T::Output::nearest(8.0 - (j % 16) as f32)).collect();
    let bias = comm.mem_alloc::<T::Output>(n)?;
    bias.copy_from_host(&biases)?;
    // C has one row more, which stays as it is.
    let c = comm.mem_alloc::<T::Output>((m + 1) * n)?;
    a.copy_from_host(&factors[0])?;
    b.copy_from_host(&factors[1])?;
    scale_a.copy_from_host(&scales[0])?;
    scale_b.copy_from_host(&scales[1])?;
    c.fill_bytes(0xff)?;
    let gemm = Gemm::new(&stream)?;
    gemm.product(shape).block_scales(&scale_a, &scale_b).bias(&bias).launch(&a, &b, &c)?;
    stream.synchronize()?;
    let mut got = vec![T::Output::nearest(0.0); c.len()];
    c.copy_to_host(&mut got)?;
    assert!(got[m * n..].iter().all(|x| x.value().is_nan()), "{problem:?} wrote past C");
    let is_wrong = |&(row, column): &(usize, usize)| {
        let mut sum = biases[column].value();
        let mut magnitude = sum.abs();
        for (block, start) in (0..k).step_by(128).enumerate() {
            // This sum is exact, as the block's sum in f32 is.
            let terms = (start..k.min(start + 128)).map(|term| {
                factors[0][row * k + term].value() * factors[1][column * k + term].value()
            });
            let scale_a = f64::from(scales[0][block * m + row]);
            let part = terms.sum::<f64>() * scale_a * scale_of_b(&scales[1], column, block, blocks);
            (sum, magnitude) = (sum + part, magnitude + part.abs());
        }
        // The product of the scales and each addition are rounded to f32, the result to C's type.
        let rounded = (blocks + 2) as f64 * f64::from(f32::EPSILON) * magnitude;
        let bound = rounded + T::Output::EPSILON / 2.0 * (sum.abs() + rounded);
        let error = (got[row * n + column].value() - sum).abs();
        error.is_nan() || error > bound
    };
    let wrong = match rank.is_simulated() || m * n <= 16 * SAMPLES {
        true => problem.all().filter(is_wrong).count(),
        false => problem.samples(SAMPLES).filter(is_wrong).count(),
    };
    assert_eq!(wrong, 0, "{}, {problem:?}", T::NAME);
    Ok(())
}

fn scale_of_b(scales: &[f32], column: usize, block: usize, blocks: usize) -> f64 {
    scales[column / 128 * blocks + block].into()
}

/// The shapes have less than a block of terms, and more blocks than stages; several tiles per block
/// of the grid; C of odd width.
#[test]
fn products_with_scales_per_block_are_right() {
    let gpus = Gpus::from(Simulation::new(1).multiprocessors(2));
    gpus.run("products_with_scales_per_block_are_right", |rank| {
        if !is_hopper(rank)? {
            return Ok(());
        }
        let shapes = match rank.is_simulated() {
            true => vec![[1, 8, 16], [130, 264, 272], [9, 129, 656]],
            false => {
                let small = [[1, 4096, 2048], [9, 129, 912], [300, 16384, 80], [130, 264, 272]];
                let large = [[1000, 1000, 1008], [1030, 4095, 1040], [4096, 4104, 7168]];
                [small.as_slice(), &large].concat()
            }
        };
        multiplies_blocks::<F8E5M2>(rank, shapes[0])?;
        shapes.into_iter().try_for_each(|shape| multiplies_blocks::<F8E4M3>(rank, shape))
    });
}

/// Each product reads what the previous one wrote, and overwrites what the previous one read.
#[test]
fn dependent_products_wait_for_each_other() {
    on_gpus("dependent_products_wait_for_each_other", 1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        // SAFETY: no kernel writes B.
        let gemm = unsafe { Gemm::new(&stream)?.with_constant_b() };
        let size = if rank.is_simulated() { 72 } else { 1024 };
        let times = if rank.is_simulated() { 4 } else { 100 };
        for m in [1, 9, 130, 600].into_iter().filter(|m| *m < size) {
            let shape = [m, size, size];
            let buffers = [comm.mem_alloc::<bf16>(m * size)?, comm.mem_alloc::<bf16>(m * size)?];
            // A permutation of the columns: every sum has one term.
            let mut b = vec![bf16::ZERO; size * size];
            (0..size).for_each(|row| b[row * size + (row + 1) % size] = bf16::ONE);
            let weights = comm.mem_alloc::<bf16>(size * size)?;
            weights.copy_from_host(&b)?;
            let first: Vec<_> = (0..m * size).map(|i| bf16::nearest((i % 251) as f32)).collect();
            for plan in gemm.plans(shape)? {
                gemm.set_plan(shape, plan)?;
                buffers[0].copy_from_host(&first)?;
                for time in 0..times {
                    gemm.launch(&buffers[time % 2], &weights, &buffers[(time + 1) % 2], shape)?;
                }
                stream.synchronize()?;
                let mut got = vec![bf16::ZERO; m * size];
                buffers[times % 2].copy_to_host(&mut got)?;
                let moved = |i: usize| i / size * size + (i + times) % size;
                let wrong = (0..m * size).filter(|i| got[*i] != first[moved(*i)]).count();
                assert_eq!(wrong, 0, "{plan} of {shape:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn a_measurement_decides_for_its_shape() {
    on_gpus("a_measurement_decides_for_its_shape", 1, |rank| {
        let stream = rank.stream()?;
        let gemm = Gemm::new(&stream)?;
        let shape = if rank.is_simulated() { [1, 9, 16] } else { [569, 1368, 14720] };
        check::<bf16>(rank, shape, 0, |a, b, c| {
            let plan = gemm.measure(a, b, c, shape)?;
            assert!(gemm.plans(shape)?.contains(&plan), "{plan}");
            assert_eq!(gemm.plan(shape)?, plan);
            // An error leaves the plan as it was.
            let short = c.slice(..1)?;
            let error = gemm.measure(a, b, &short, shape).unwrap_err().to_string();
            assert!(error.contains("C has 1 elements"), "{error}");
            assert_eq!(gemm.plan(shape)?, plan);
            // All plans of unaligned buffers are one kernel.
            let less @ [m, _, k] = [shape[0], shape[1], shape[2] - 8];
            let error = gemm.measure(&a.slice(1..1 + m * k)?, b, c, less).unwrap_err().to_string();
            assert!(error.contains("A begins at"), "{error}");
            c.fill_bytes(0xff)?;
            gemm.launch(a, b, c, shape)?;
            stream.synchronize()
        })
    });
}

#[test]
fn a_product_is_the_same_a_thousand_times() {
    on_gpus("a_product_is_the_same_a_thousand_times", 1, |rank| {
        let stream = rank.stream()?;
        let gemm = Gemm::new(&stream)?;
        let (shapes, times) = match rank.is_simulated() {
            true => ([[9, 72, 72], [70, 136, 40]], 10),
            false => ([[16, 4096, 1024], [513, 1024, 512]], 1000),
        };
        for shape in shapes {
            check::<bf16>(rank, shape, 0, |a, b, c| {
                let mut same: Option<Vec<u16>> = None;
                for _ in 0..times {
                    c.fill_bytes(0xff)?;
                    gemm.launch(a, b, c, shape)?;
                    stream.synchronize()?;
                    let mut got = vec![bf16::ZERO; c.len()];
                    c.copy_to_host(&mut got)?;
                    let got: Vec<u16> = got.into_iter().map(bf16::to_bits).collect();
                    assert!(same.get_or_insert_with(|| got.clone()) == &got, "{shape:?}");
                }
                Ok(())
            })?;
        }
        Ok(())
    });
}

#[test]
fn products_of_random_shapes_are_right() {
    on_gpus("products_of_random_shapes_are_right", 1, |rank| {
        let stream = rank.stream()?;
        let gemm = Gemm::new(&stream)?;
        let mut random = fastrand::Rng::with_seed(14);
        let (count, most) = if rank.is_simulated() { (4, 160) } else { (200, 3000) };
        for _ in 0..count {
            // Half of the shapes are aligned.
            let unit = if random.bool() { 8 } else { 1 };
            let [n, k] = [(); 2].map(|()| random.usize(1..=most / unit) * unit);
            let shape = [random.usize(1..=most), n, k];
            check::<bf16>(rank, shape, 0, |a, b, c| {
                gemm.launch(a, b, c, shape)?;
                stream.synchronize()
            })?;
        }
        Ok(())
    });
}

/// The epilogue of a product that only rounds its sums.
const PLAIN: FusedArgs<u64, u64, u64, u64, f32, f32> =
    FusedArgs { scale_a: 0, scale_b: 0, bias: 0, residual: 0, linear: 0.0, cubic: 0.0 };

#[test]
fn the_portable_kernel_multiplies_matrices_of_any_shape_and_alignment() {
    let name = "the_portable_kernel_multiplies_matrices_of_any_shape_and_alignment";
    on_gpus(name, 1, |rank| {
        rank.load(&KERNELS)?;
        let stream = rank.stream()?;
        // There are fewer blocks than tiles.
        let blocks = if rank.is_simulated() { 2 } else { 300 };
        let config = LaunchConfig::new(blocks, sizes::THREADS).with_dynamic_shared(sizes::SHARED);
        for shape in portable_shapes(rank) {
            let [m, n, k] = shape.map(|extent| extent as u32);
            check::<bf16>(rank, shape, 0, |a, b, c| {
                let product =
                    kernels::gemm_mma::<bf16>::args(a, b, c, m, n, k, false, false, PLAIN);
                // SAFETY: the matrices have the sizes of the shape.
                unsafe { product.config(config).launch(&stream)? };
                stream.synchronize()
            })?;
            check::<f16>(rank, shape, 0, |a, b, c| {
                let product = kernels::gemm_mma::<f16>::args(a, b, c, m, n, k, false, false, PLAIN);
                // SAFETY: the matrices have the sizes of the shape.
                unsafe { product.config(config).launch(&stream)? };
                stream.synchronize()
            })?;
        }
        Ok(())
    });
}

/// Returns shapes for products of transposed factors: extents that are multiples of 8, with a part
/// of a tile and more steps than stages; odd extents; vectors.
fn transposed_shapes(rank: &Rank) -> Vec<[usize; 3]> {
    let small = [[8, 16, 328], [136, 264, 72], [7, 9, 5], [66, 127, 34], [1, 24, 8], [16, 1, 9]];
    if rank.is_simulated() {
        return small.to_vec();
    }
    let large = [[4096, 4096, 256], [5000, 6008, 1096], [1000, 1001, 1002], [2001, 3000, 1000]];
    let mixed = [8, 120, 1000].into_iter().flat_map(|m| [64, 1000].map(|n| [m, n, 1024]));
    small.into_iter().chain(large).chain(mixed).collect()
}

/// Returns the transpose of the first `rows` x `columns` elements.
fn transpose<T: Number + Element>(
    rank: &Rank,
    matrix: &DeviceSlice<T>,
    [rows, columns]: [usize; 2],
) -> Result<DeviceSlice<T>> {
    let mut elements = vec![T::nearest(0.0); rows * columns];
    matrix.slice(..elements.len())?.copy_to_host(&mut elements)?;
    let column = |c: usize| elements.iter().skip(c).step_by(columns).copied();
    let transposed: Vec<T> = (0..columns).flat_map(column).collect();
    let matrix = rank.communicator()?.mem_alloc::<T>(transposed.len())?;
    matrix.copy_from_host(&transposed)?;
    matrix.slice(..)
}

/// Checks products with A, B or both stored transposed, by [`Gemm`] and by the portable kernel.
macro_rules! multiplies_transposed {
    ($type:ident, $rank:ident) => {{
        let stream = $rank.stream()?;
        let gemm = Gemm::new(&stream)?;
        for shape @ [m, n, k] in transposed_shapes($rank) {
            for layout in [[false, true], [true, false], [true, true]] {
                let [of_a, of_b] = layout;
                let stored = |matrix: &DeviceSlice<$type>, rows, transposed| match transposed {
                    true => transpose($rank, matrix, [rows, k]),
                    false => matrix.slice(..),
                };
                check::<$type>($rank, shape, 0, |a, b, c| {
                    let (a, b) = (stored(a, m, of_a)?, stored(b, n, of_b)?);
                    let product = gemm.product(shape);
                    let product = if of_a { product.transposed_a() } else { product };
                    let product = if of_b { product.transposed_b() } else { product };
                    product.launch(&a, &b, c)?;
                    stream.synchronize()
                })?;
                check::<$type>($rank, shape, 0, |a, b, c| {
                    let (a, b) = (stored(a, m, of_a)?, stored(b, n, of_b)?);
                    let [m, n, k] = shape.map(|extent| extent as u32);
                    let product =
                        kernels::gemm_mma::<$type>::args(&a, &b, c, m, n, k, of_a, of_b, PLAIN);
                    let config = LaunchConfig::new(2, sizes::THREADS);
                    let config = config.with_dynamic_shared(sizes::SHARED);
                    // SAFETY: the matrices have the sizes of the shape.
                    unsafe { product.config(config).launch(&stream)? };
                    stream.synchronize()
                })?;
            }
        }
    }};
}

#[test]
fn factors_may_be_stored_transposed() {
    on_gpus("factors_may_be_stored_transposed", 1, |rank| {
        rank.load(&KERNELS)?;
        multiplies_transposed!(bf16, rank);
        // f16 has the same code, so that on simulated GPUs one type is enough.
        if !rank.is_simulated() {
            multiplies_transposed!(f16, rank);
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
            ([64, 0, 8], "nothing to do"),
            ([65, 64, 64], "A has 4096 elements"),
            ([64, 72, 64], "B has 4096 elements"),
            ([512, 512, 8], "C has 4096 elements"),
        ] {
            let error = gemm.launch(&buffer, &buffer, &buffer, shape).err().map(|e| e.to_string());
            assert!(error.as_ref().is_some_and(|e| e.contains(reason)), "{shape:?}: {error:?}");
        }
        let launch = |product: Product<'_, bf16, bf16>| {
            product.launch(&buffer, &buffer, &buffer).err().map(|e| e.to_string())
        };
        let short = launch(gemm.product([8, 64, 64]).bias(&buffer.slice(..63)?));
        let reason = "the bias has 63 elements, but needs 1 x 64";
        assert!(short.as_ref().is_some_and(|e| e.contains(reason)), "{short:?}");
        let short = launch(gemm.product([8, 64, 64]).residual(&buffer.slice(1 + 64 * 56..)?));
        let reason = "the residual has 511 elements, but needs 8 x 64";
        assert!(short.as_ref().is_some_and(|e| e.contains(reason)), "{short:?}");
        let none = gemm.set_plan([8, 9, 9], GemmPlan::Wide).err().map(|e| e.to_string());
        assert!(none.as_ref().is_some_and(|e| e.contains("the plan `wide` is none")), "{none:?}");
        Ok(())
    });
}
