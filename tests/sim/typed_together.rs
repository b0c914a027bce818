//! Tests of flags, epochs, grid barriers, barriers of neighbour ranks, and sums over threads.

use devcomm::{DevCommRequirements, Kernel, Simulation};
use devcomm_testing::simulated::{Gpu, failure, read, simulate};
use reduce_copy_kernels::together::{
    grid_meets, neighbors_meet, pass_on, sum_threads, sum_vectors,
};

/// Returns simulations of 1 to 4 ranks, each with a different schedule.
fn simulations(seeds: u64) -> impl Iterator<Item = (usize, Simulation)> {
    (0..seeds).map(|seed| {
        let ranks = 1 + seed as usize % 4;
        (ranks, Simulation::new(ranks).seed(seed).preempt(seed % 8 > 5))
    })
}

fn comm(gpu: &Gpu<'_>) -> devcomm::Result<devcomm::DevCommResource> {
    gpu.dev_comm(DevCommRequirements::new())
}

#[test]
fn flags_bring_what_was_written_before_in_every_launch() {
    let (blocks, count, steps, launches) = (2, 5, 3, 4);
    for (ranks, simulation) in simulations(40) {
        let found = simulate(simulation, |gpu| {
            let of_rank = vec![100 * gpu.rank() as u32; 2 * count];
            let (comm, x) = (comm(gpu)?, gpu.window(&of_rank)?);
            let (y, flags) = (gpu.window(&of_rank)?, gpu.window(&[0_u32; 4])?);
            let epoch = gpu.buffer(&[0_u32, 0])?;
            for _ in 0..launches {
                gpu.launch(
                    pass_on::args(&comm, &x, &y, &flags, &epoch, count, steps)
                        .grid(blocks)
                        .block(3),
                )?;
            }
            Ok((read(&x)?, read(&epoch)?))
        });
        let moved = launches * steps;
        for (rank, (x, epoch)) in found.into_iter().enumerate() {
            let from = (rank + moved as usize * (ranks - 1)) % ranks;
            assert!(x.iter().all(|&x| x == 100 * from as u32 + moved), "{ranks} ranks: {x:?}");
            assert_eq!(epoch, [0, launches]);
        }
    }
}

#[test]
fn flags_wrap_around() {
    for (ranks, simulation) in simulations(8) {
        let found = simulate(simulation, |gpu| {
            let of_rank = vec![gpu.rank() as u32; 2];
            let (comm, x, y) = (comm(gpu)?, gpu.window(&of_rank)?, gpu.window(&of_rank)?);
            // The values after 2^30 - 1 launches of 4 steps; the next launch ends with flags of 0.
            let flags = gpu.window(&[u32::MAX - 3; 2])?;
            let epoch = gpu.buffer(&[0_u32, (1 << 30) - 1])?;
            for _ in 0..2 {
                gpu.launch(
                    pass_on::args(&comm, &x, &y, &flags, &epoch, 2_usize, 4_u32).grid(1).block(2),
                )?;
            }
            read(&flags)
        });
        assert!(found.iter().all(|flags| *flags == [4, 4]), "{ranks} ranks: {found:?}");
    }
}

#[test]
fn odd_and_even_epochs_take_turns_also_where_they_wrap_around() {
    let found = simulate(Simulation::new(2), |gpu| {
        let (comm, x) = (comm(gpu)?, gpu.window(&[0_u32])?);
        let (y, flags) = (gpu.window(&[0_u32])?, gpu.window(&[u32::MAX - 1; 2])?);
        let epoch = gpu.buffer(&[0, u32::MAX - 1])?;
        let pass_on = pass_on::args(&comm, &x, &y, &flags, &epoch, 1_usize, 1_u32);
        let mut epochs = Vec::new();
        for _ in 0..3 {
            gpu.launch(pass_on.grid(1).block(1))?;
            epochs.push(read(&epoch)?[1]);
        }
        Ok(epochs)
    });
    assert!(found.iter().all(|epochs| *epochs == [u32::MAX, 2, 3]), "{found:?}");
}

#[test]
fn a_flag_that_no_rank_posts_is_named() {
    let error = failure(Simulation::new(2), |gpu| {
        let (comm, x) = (comm(gpu)?, gpu.window(&[0_u32; 1])?);
        let (y, flags) = (gpu.window(&[0_u32; 1])?, gpu.window(&[0_u32; 2])?);
        let epoch = gpu.buffer(&[0_u32; 2])?;
        let steps = 2 + gpu.rank() as u32;
        gpu.launch(pass_on::args(&comm, &x, &y, &flags, &epoch, 1_usize, steps).grid(1).block(1))
    });
    assert!(error.to_string().contains("flag 0, which is 2 and not yet 3"), "{error}");
}

#[test]
fn all_blocks_of_a_grid_meet_in_every_launch() {
    let (blocks, rounds) = (5, 4_u32);
    for (_, simulation) in simulations(40) {
        let found = simulate(simulation, |gpu| {
            let (comm, word) = (comm(gpu)?, gpu.buffer(&[0_u32])?);
            let (slots, sums) = (gpu.buffer(&[0_u32; 5])?, gpu.buffer(&[0_u32; 5])?);
            for _ in 0..3 {
                gpu.launch(
                    grid_meets::args(&comm, &word, &slots, &sums, rounds).grid(blocks).block(33),
                )?;
            }
            read(&sums)
        });
        let wanted = blocks * rounds * (rounds + 1) / 2;
        assert!(found.iter().flatten().all(|&sum| sum == wanted), "{found:?}");
    }
}

#[test]
fn neighbours_meet_in_every_launch() {
    for (_, simulation) in simulations(60) {
        let found = simulate(simulation, |gpu| {
            let (comm, words) = (comm(gpu)?, gpu.window(&[0_u32; 6])?);
            let (mail, wrong) = (gpu.window(&[0_u32; 4])?, gpu.buffer(&[9_u32; 2])?);
            for rounds in [4_u32, 3] {
                gpu.launch(
                    neighbors_meet::args(&comm, &words, &mail, &wrong, rounds).grid(2).block(34),
                )?;
            }
            Ok((read(&wrong)?, read(&words)?))
        });
        for (wrong, words) in found {
            // The epochs after two barriers in each of 4 + 3 rounds.
            assert_eq!((wrong, words), (vec![0, 0], vec![14; 6]));
        }
    }
}

#[test]
fn sums_over_warps_and_blocks_are_those_of_their_threads() {
    simulate(Simulation::new(1), |gpu| {
        let x: Vec<f32> = (0..1000).map(|i| (i % 17) as f32 - 3.0).collect();
        let (blocks, threads) = (3, 96);
        let buffer = gpu.buffer(&x)?;
        let (of_blocks, of_warps) = (gpu.buffer(&[0_f32; 6])?, gpu.buffer(&[0_f32; 9])?);
        let args = (&buffer, &of_blocks, &of_warps, x.len());
        gpu.launch(sum_threads::<f32>::with_args(args).grid(blocks).block(threads))?;
        let of_threads: Vec<f32> = (0..288).map(|i| x.iter().skip(i).step_by(288).sum()).collect();
        let warps: Vec<f32> = of_threads.chunks(32).map(|warp| warp.iter().sum()).collect();
        let blocks = of_threads.chunks(96).map(|block| block.iter().sum::<f32>());
        assert_eq!(read(&of_warps)?, warps);
        assert_eq!(read(&of_blocks)?, blocks.flat_map(|sum| [sum, 96.0 * sum]).collect::<Vec<_>>());
        // Integer sums wrap around.
        let big = gpu.buffer(&[u64::MAX, 5, 7])?;
        let (of_block, of_warp) = (gpu.buffer(&[0_u64; 2])?, gpu.buffer(&[0_u64])?);
        gpu.launch(sum_threads::<u64>::args(&big, &of_block, &of_warp, 3_usize).grid(1).block(32))?;
        assert_eq!((read(&of_block)?, read(&of_warp)?), (vec![11, 352], vec![11]));
        Ok(())
    });
}

#[test]
fn a_vector_is_summed_over_the_ranks_and_stored_to_all() {
    for (ranks, simulation) in simulations(16) {
        let found = simulate(simulation, |gpu| {
            let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(5))?;
            let of_rank: Vec<f32> = (0..20).map(|i| (i * (gpu.rank() + 1)) as f32).collect();
            let (x, y) = (gpu.window(&of_rank)?, gpu.window(&[0_f32; 20])?);
            gpu.launch(sum_vectors::<f32>::args(&comm, &x, &y).grid(5).block(32))?;
            read(&y)
        });
        let factor = (ranks * (ranks + 1) / 2) as f32;
        let wanted: Vec<f32> = (0..20).map(|i| i as f32 * factor).collect();
        assert!(found.iter().all(|y| *y == wanted), "{ranks} ranks: {found:?}");
    }
}
