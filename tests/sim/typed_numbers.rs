//! Tests of reductions over threads and ranks by any operator, of rounding, and of views.

use cuda_std::{bf16, f16};
use devcomm::{DevCommRequirements, LlA2a, Simulation};
use devcomm_testing::simulated::{failure, read, simulate};
use reduce_copy_kernels::numbers::{
    RESULTS, all_reduce_numbers, load_behind_row, reduce_numbers, round_numbers, transpose_part,
};

#[test]
fn warps_and_blocks_reduce_by_any_operator() {
    for (seed, threads) in (0..12).zip([32, 96, 160, 1024].into_iter().cycle()) {
        let simulation = Simulation::new(1).seed(seed).preempt(seed % 4 == 3);
        simulate(simulation, |gpu| {
            // The maximum, 18, is there again 31 elements further on, in another warp.
            let x: Vec<f32> = (0..threads).map(|i| (i * 37 % 31) as f32 - 12.0).collect();
            let out = gpu.buffer(&vec![0_f32; threads * RESULTS])?;
            let from = gpu.buffer(&x)?;
            let args = reduce_numbers::args(&from, &out);
            // SAFETY: both have the elements of all threads.
            unsafe { args.grid(1).block(threads as u32).launch(&gpu.stream()?)? };
            let sum: f32 = x.iter().map(|x| (x - 18.0).exp()).sum();
            let place = x.iter().position(|x| *x == 18.0).unwrap() as f32;
            for (i, got) in read(&out)?.chunks(RESULTS).enumerate() {
                // The results are those that `reduce_numbers` describes, in its order.
                let warp = &x[i / 32 * 32..][..32];
                let least = warp.iter().copied().fold(f32::INFINITY, f32::min);
                let of_four: f32 = x[i / 4 * 4..][..4].iter().sum();
                assert_eq!(got[..4], [18.0, 18.0, place, 18.0], "thread {i} of {threads}");
                assert!((got[4] / sum - 1.0).abs() < 1e-5, "{} is not {sum}", got[4]);
                let last = (i / 32 * 32 + 31) as f32;
                let prefix = warp[..=i % 32].iter().sum();
                let same = warp.iter().filter(|y| **y == x[i]).count() as f32;
                let want = [warp.iter().sum(), least, of_four, last, prefix, same];
                assert_eq!(got[5..], want, "thread {i}");
            }
            Ok(())
        });
    }
}

#[test]
fn a_few_numbers_are_reduced_over_the_ranks_inside_a_kernel() {
    let (blocks, rounds, launches) = (2, 3, 2);
    for seed in 0..60 {
        let ranks = 1 + seed as usize % 4;
        let simulation = Simulation::new(ranks).seed(seed).preempt(seed % 8 > 5);
        simulate(simulation.weak(seed % 2 == 0), |gpu| {
            let mut requirements = DevCommRequirements::new().lsa_multimem(seed % 3 == 0);
            let key = requirements.add(LlA2a {
                blocks: 3 * blocks,
                max_elements: ranks as u32,
                element_size: 8,
            });
            let comm = gpu.dev_comm(requirements)?;
            let (exchange, stream) = (comm.resource(key)?, gpu.stream()?);
            let out = gpu.buffer(&vec![0_u64; (blocks * 64 * 3 * rounds) as usize])?;
            for _ in 0..launches {
                let args = all_reduce_numbers::args(&comm, exchange, &out, rounds);
                // SAFETY: the memory has three sessions per block.
                unsafe { args.grid(blocks).block(64).launch(&stream)? };
            }
            stream.synchronize()?;
            let n = ranks as u32;
            let pair = |[sum, max]: [u32; 2]| u64::from(sum) | u64::from(max) << 32;
            // Rank `r` contributes `number + 10 * r`.
            let reduced = |number: u32| [n * number + 5 * n * (n - 1), number + 10 * (n - 1)];
            for (i, got) in read(&out)?.chunks(3).enumerate() {
                let (thread, round) = (i as u32 / rounds, i as u32 % rounds);
                let (block, warp) = (thread / 64, thread % 64 / 32);
                let number = round + block;
                let [sum, max] = reduced(number + warp);
                let wanted = [reduced(number), [sum, max], [n * sum, max]].map(pair);
                assert_eq!(got, wanted, "thread {thread}, round {round}, {ranks} ranks");
            }
            Ok(())
        });
    }
}

#[test]
fn numbers_are_rounded_to_the_nearest_with_ties_to_even() {
    simulate(Simulation::new(1), |gpu| {
        // Halves plus a bit that the narrow types round away, which leaves ties, and `f32` keeps.
        let x: Vec<f32> = (0..64).map(|i| (i as f32 - 30.0) / 2.0 + 1.0 / 4096.0).collect();
        let (from, even) = (gpu.buffer(&x)?, gpu.buffer(&[0_f32; 64])?);
        macro_rules! rounds_to {
            ($type:ident, $zero:expr, $round:expr) => {
                let to = gpu.buffer(&[$zero; 64])?;
                let args = round_numbers::<$type>::args(&from, &to, &even);
                // SAFETY: the buffers have 16 elements for each of four threads.
                unsafe { args.grid(1).block(4).launch(&gpu.stream()?)? };
                let rounded: Vec<$type> = x.iter().map($round).collect();
                assert_eq!(read(&to)?, rounded);
                let integers = rounded.iter().map(|x| f32::from(*x).round_ties_even());
                assert_eq!(read(&even)?, integers.collect::<Vec<_>>());
            };
        }
        rounds_to!(f32, 0.0, |x| *x);
        rounds_to!(f16, f16::ZERO, |x| f16::from_f32(*x));
        rounds_to!(bf16, bf16::ZERO, |x| bf16::from_f32(*x));
        Ok(())
    });
}

#[test]
fn views_have_parts_and_strides() {
    let [rows, columns, skip] = [7, 40, 3];
    simulate(Simulation::new(1), |gpu| {
        let x: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
        let (x, y) = (gpu.window(&x)?, gpu.window(&vec![-1_f32; 2 * rows * columns])?);
        gpu.launch(transpose_part::args(&x, &y, rows, columns, skip).grid(2).block(64))?;
        let got = read(&y)?;
        for (i, &got) in got.iter().enumerate() {
            let (plane, column, row) = (i / (rows * columns), i / rows % columns, i % rows);
            let is_part = plane == 1 && column < columns - skip && row < rows - 1;
            let wanted = if is_part { (row + 1) * columns + column + skip } else { 0 };
            assert_eq!(got, if is_part { wanted as f32 } else { -1.0 }, "element {i}");
        }
        Ok(())
    });
}

#[test]
fn an_index_outside_a_view_is_reported_though_it_is_within_the_memory() {
    let error = failure(Simulation::new(1), |gpu| {
        let (x, out) = (gpu.window(&[0_f32; 10])?, gpu.buffer(&[0_f32])?);
        gpu.launch(load_behind_row::args(&x, &out, 5_usize).grid(1).block(1)).map(drop)
    });
    let text = error.to_string();
    assert!(text.contains("1 elements at [0, 5] of a view of [2, 5]"), "{text}");
    assert!(text.contains("numbers.rs:"), "{text}");
}
