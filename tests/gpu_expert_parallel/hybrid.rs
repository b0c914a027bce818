//! Tests of several LSA teams, between which rows go over the network.

use std::time::Duration;

use devcomm::{Error, ExpertParallelMemory, LaunchError};

use super::f8::dispatch_f8;
use super::*;

/// Simulated worlds: the number of GPUs, and the size of each LSA team.
const WORLDS: [(usize, usize); 7] = [(2, 1), (3, 1), (4, 2), (6, 3), (8, 4), (8, 2), (16, 4)];

/// Returns simulated GPUs, small ones, since worlds have many.
fn machine(ranks: usize, team: usize) -> Simulation {
    Simulation::new(ranks).team_size(team).multiprocessors(2)
}

/// Runs `body` on 2 GPUs in teams of one, or in each simulated world; with the size of a team.
fn between_teams(name: &str, worlds: &[(usize, usize)], body: impl Fn(&Rank) -> Result<()> + Sync) {
    for (ranks, team) in if Gpus::are_real() { &[(2, 1)] } else { worlds } {
        let gpus = Gpus::from(machine(*ranks, *team)).with_several_teams();
        gpus.run(&format!("{name} on {ranks} in teams of {team}"), &body);
    }
}

/// Returns a batch for the rank's world.
fn batch_for(rank: &Rank, hidden: usize, experts: usize, top_k: usize, seed: u64) -> Result<Batch> {
    // Each rank has another number of tokens, one of them none.
    let ranks = rank.n_ranks();
    let tokens: Vec<_> = (0..ranks).map(|rank| (rank * 3 + seed as usize) % 5).collect();
    in_teams(rank, Batch::new(hidden, experts, top_k, &tokens, seed))
}

fn in_teams(rank: &Rank, mut batch: Batch) -> Result<Batch> {
    let properties = rank.communicator()?.properties()?;
    assert!(properties.n_lsa_teams > 1);
    batch.team = Some(properties.lsa_size());
    Ok(batch)
}

/// Returns memory with few simulated threads: machines have many GPUs.
fn memory_of(rank: &Rank, batch: &Batch, most: usize) -> Result<Memory> {
    let options = options(batch, most);
    let few = options.blocks(2).threads(64);
    Memory::new(rank, if rank.is_simulated() { few } else { options }, batch, most)
}

#[test]
fn rows_go_to_their_experts_in_other_teams_and_results_return() {
    let name = "rows_go_to_their_experts_in_other_teams_and_results_return";
    between_teams(name, &WORLDS, |rank| {
        let cases = [
            (Routing::Random, 3),
            (Routing::Skewed, 8),
            (Routing::One, 2),
            (Routing::None, 1),
            (Routing::Repeated, 16),
        ];
        // Many simulated GPUs take time.
        let cases = if rank.n_ranks() > 4 { &cases[..2] } else { &cases };
        for (i, (routing, top_k)) in cases.iter().enumerate() {
            let mut batch = batch_for(rank, 136, 2 * rank.n_ranks(), *top_k, i as u64)?;
            batch.alignment = [1, 4][i % 2];
            let memory = memory_of(rank, &batch, 5)?;
            for launch in 0..3 {
                batch.route(*routing, launch);
                checked_step(rank, &memory, &batch, launch == 1)?;
            }
        }
        Ok(())
    });
}

/// There are more tokens than a message takes, so that blocks have several messages, and those of
/// some ranks fewer.
#[test]
fn blocks_have_several_messages() {
    between_teams("blocks_have_several_messages", &[(2, 1), (4, 2)], |rank| {
        let most = 70;
        let tokens: Vec<_> = (0..rank.n_ranks()).map(|rank| [most, 1, 33, 64][rank]).collect();
        let batch = Batch::new(24, 8, 3, &tokens, 1);
        let mut batch = in_teams(rank, batch)?;
        for blocks in [1, 2] {
            let options = options(&batch, most).blocks(blocks).threads(64);
            let memory = Memory::new(rank, options, &batch, most)?;
            for launch in 0..3 {
                batch.route([Routing::Random, Routing::Skewed][launch % 2], launch as u64);
                checked_step(rank, &memory, &batch, launch == 1)?;
            }
        }
        Ok(())
    });
}

/// The ranks' own numbers of multiprocessors lead to messages of different numbers of tokens.
#[test]
fn ranks_whose_gpus_differ_send_the_same_messages() {
    if Gpus::are_real() {
        return;
    }
    let uneven = Simulation::new(2).team_size(1).multiprocessors_in_turn([3, 2]);
    let gpus = Gpus::from(uneven).with_several_teams();
    gpus.run("ranks_whose_gpus_differ_send_the_same_messages", |rank| {
        let batch = in_teams(rank, Batch::new(24, 8, 3, &[5, 4], 1))?.routed(Routing::Random, 1);
        let memory = Memory::new(rank, options(&batch, 5).threads(64), &batch, 5)?;
        let said = format!("{:?}", memory.experts);
        assert!(said.contains("2 blocks, messages of 3 tokens"), "{said}");
        checked_step(rank, &memory, &batch, WHOLE)
    });
}

/// The order of the sums in teams of one rank is that of the form for one team.
#[test]
fn teams_of_one_give_the_bits_of_one_team() {
    let name = "teams_of_one_give_the_bits_of_one_team";
    let tokens = [4, 3];
    let step = |rank: &Rank| {
        let batch = Batch::new(264, 8, 4, &tokens, 9).routed(Routing::Repeated, 2);
        let memory = memory_of(rank, &batch, 4)?;
        // The reference is for one team: `batch.team` is not set.
        checked_step(rank, &memory, &batch, WHOLE)?;
        checked_step(rank, &memory, &batch, IN_HALVES)
    };
    between_teams(name, &[(2, 1)], step);
    on_gpus(&format!("{name}, one team"), 2, step);
}

/// Blocks of 128 elements have different magnitudes, and rows no whole number of a warp's parts.
#[test]
fn rows_arrive_in_other_teams_as_8_bit_floats_with_scales() {
    let name = "rows_arrive_in_other_teams_as_8_bit_floats_with_scales";
    between_teams(name, &[(2, 1), (4, 2), (6, 3), (8, 2)], |rank| {
        let mut batch = batch_for(rank, 640, 2 * rank.n_ranks(), 3, 1)?;
        for (i, x) in batch.inputs.iter_mut().flatten().enumerate() {
            *x = bf16::from_f32(x.to_f32() * ((i / 128 * 7 % 41) as f32 - 20.0).exp2());
        }
        let few = options(&batch, 5).f8().blocks(2).threads(64);
        let memory = Memory::new(rank, few, &batch, 5)?;
        for (launch, routing) in [Routing::Random, Routing::Repeated].into_iter().enumerate() {
            batch.route(routing, launch as u64);
            let layout = dispatch_f8(rank, &memory, &batch, launch == 1)?;
            memory.apply(rank, &batch, &layout)?;
            memory.experts.combine(&memory.rows, &memory.output, None, &memory.stream)?;
            memory.check_output(&batch.combined(rank.rank(), None, factor))?;
        }
        memory.experts.check()
    });
}

/// Dispatches follow each other without a combine between them, and combines without a dispatch.
#[test]
fn each_half_of_a_step_between_teams_may_be_repeated() {
    let name = "each_half_of_a_step_between_teams_may_be_repeated";
    between_teams(name, &[(2, 1), (4, 2)], |rank| {
        let mut batch = batch_for(rank, 72, 16, 4, 1)?;
        let memory = memory_of(rank, &batch, 5)?;
        let Memory { experts, stream, rows, output, .. } = &memory;
        for launch in 0..3 {
            batch.route(Routing::Random, launch);
            memory.write(rank, &batch)?;
            for _ in 0..3 {
                experts.dispatch(memory.tokens(batch.tokens[rank.rank()]), stream)?;
            }
            experts.group(rows, stream)?;
            for _ in 0..3 {
                experts.combine(rows, output, None, stream)?;
            }
            memory.check_rows(rank, &batch)?;
            memory.check_output(&batch.combined(rank.rank(), None, |_| 1.0))?;
        }
        Ok(())
    });
}

#[test]
fn a_thousand_replays_of_a_step_between_teams_are_right() {
    let name = "a_thousand_replays_of_a_step_between_teams_are_right";
    between_teams(name, &[(4, 2)], |rank| {
        let [hidden, tokens, replays] =
            if rank.is_simulated() { [264, 3, 5] } else { [7168, 128, 1000] };
        let batch = Batch::new(hidden, 256, 8, &vec![tokens; rank.n_ranks()], 5);
        let mut batch = in_teams(rank, batch)?;
        let memory = memory_of(rank, &batch, tokens)?;
        replay_steps(rank, &memory, &mut batch, tokens, replays)
    });
}

/// The steps run on other schedules of the simulator, without anything that keeps launches apart.
#[test]
fn steps_between_teams_are_right_in_many_schedules() {
    let name = "steps_between_teams_are_right_in_many_schedules";
    for simulation in
        [machine(2, 1).weak(true), machine(4, 2).weak(true), machine(4, 2).preempt(true)]
    {
        let gpus = Gpus::from(simulation).with_several_teams();
        gpus.run_seeds(name, 1..6, |rank, seed| {
            let mut random = fastrand::Rng::with_seed(seed);
            let tokens: Vec<_> = (0..rank.n_ranks()).map(|_| random.usize(..4)).collect();
            let mut batch = in_teams(rank, Batch::new(72, 8, 3, &tokens, seed))?;
            let memory = memory_of(rank, &batch, 4)?;
            for launch in 0..3 {
                batch.route(Routing::Repeated, seed + launch);
                checked_step(rank, &memory, &batch, launch == 2)?;
            }
            for _ in 0..3 {
                memory.step(batch.tokens[rank.rank()])?;
            }
            memory.check_output(&batch.combined(rank.rank(), None, |_| 1.0))
        });
    }
}

#[test]
fn experts_that_do_not_exist_are_reported_between_teams() {
    let name = "experts_that_do_not_exist_are_reported_between_teams";
    between_teams(name, &[(4, 2)], |rank| {
        let batch = Batch::new(64, 8, 4, &vec![5; rank.n_ranks()], 1).routed(Routing::Random, 1);
        let mut batch = in_teams(rank, batch)?;
        let memory = memory_of(rank, &batch, 5)?;
        for ids in &mut batch.ids {
            (ids[6], ids[9], ids[19]) = (8, i32::MIN, i32::MAX);
        }
        let error = checked_step(rank, &memory, &batch, IN_HALVES).unwrap_err().to_string();
        assert!(error.contains("3 experts of tokens do not exist"), "{error}");
        // The error is reported once.
        memory.experts.check()
    });
}

#[test]
fn what_several_teams_cannot_do_is_refused() {
    between_teams("what_several_teams_cannot_do_is_refused", &[(4, 2)], |rank| {
        let comm = rank.communicator()?;
        let experts = 4 * rank.n_ranks();
        let new = || ExpertParallelOptions::new(64, 40, experts, 2);
        let refused = |options: ExpertParallelOptions, why: &str| {
            let error = options.build(comm).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        refused(new().blocks(1 + rank.rank() as u32), "blocks is 1 on rank 0 and 2 on rank 1");
        refused(ExpertParallelOptions::new(64, 40, experts + 1, 2), "each rank has as many");
        refused(new().throughput(100), "high throughput among several");
        let built = new().blocks(2).build(comm)?;
        let absent = built.set_absent(&[(rank.rank() + 1) % 4], &rank.stream()?);
        let absent = absent.unwrap_err().to_string();
        assert!(absent.contains("absent ranks among 2 LSA teams"), "{absent}");
        let said = format!("{built:?}");
        assert!(said.contains("LSA teams, 2 blocks, messages of 20 tokens"), "{said}");
        Ok(())
    });
}

/// A rank that does not come leaves the others' kernels waiting.
#[test]
fn the_host_ends_waits_for_a_rank_of_another_team() {
    for (name, combines) in [("in a dispatch", false), ("in a combine", true)] {
        let name = format!("the_host_ends_waits_for_a_rank_of_another_team {name}");
        let gpus = Gpus::from(machine(2, 1)).with_several_teams().unchecked();
        gpus.run(&name, |rank| {
            let batch = Batch::new(264, 8, 2, &[5, 5], 1).routed(Routing::Random, 1);
            let memory = memory_of(rank, &batch, 5)?;
            memory.write(rank, &batch)?;
            let Memory { experts, stream, rows, output, .. } = &memory;
            if combines {
                experts.dispatch(memory.tokens(5), stream)?;
                experts.group(rows, stream)?;
            }
            stream.synchronize()?;
            rank.barrier()?;
            if rank.rank() == 0 {
                match combines {
                    false => experts.dispatch(memory.tokens(5), stream)?,
                    true => experts.combine(rows, output, None, stream)?,
                }
                let ended = stream.synchronize_within(Duration::from_millis(200));
                let Err(Error::Launch(LaunchError::KernelAborted { rank: 0, stuck, .. })) = ended
                else {
                    panic!("the kernel was not ended: {ended:?}");
                };
                assert!(!stuck.is_empty());
            }
            rank.barrier()
        });
    }
}

#[test]
fn memory_between_teams_is_as_large_as_it_says() {
    let options = ExpertParallelOptions::new(7168, 128, 256, 8);
    let row = 7168 * 2;
    let ExpertParallelMemory { dispatch_slots, combine_slots, rows, .. } =
        options.memory_in_teams(16, 4).unwrap();
    // 32 messages of 4 tokens for each team: a header, two words for each expert, and rows.
    assert_eq!(dispatch_slots, 3 * 4 * 32 * (16 + 4 * 8 * 8 + 4 * row));
    assert_eq!(combine_slots, (3 * 4 + 16) * 128 * row);
    assert_eq!(rows, 16 * 128 * row);
    // An element is a byte, and 128 of them have 4 bytes of scale, in whole vectors for 512.
    let [row, scales] = [7168, 7168 / 512 * 16];
    let ExpertParallelMemory { dispatch_slots, rows, .. } =
        options.f8().memory_in_teams(16, 4).unwrap();
    assert_eq!(dispatch_slots, 3 * 4 * 32 * (16 + 4 * 8 * 8 + 4 * (row + scales)));
    assert_eq!(rows, 16 * 128 * (row + scales));
    for (ranks, teams) in [(16, 1), (16, 3), (16, 0)] {
        assert!(options.memory_in_teams(ranks, teams).is_err());
    }
}
