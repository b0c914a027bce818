//! The time of a launch of a small all-to-all kernel, with each set of launch attributes.

use devcomm::kernels::collectives::exchange::{Messages, MessagesArgs};
use devcomm::kernels::push_exchange;
use devcomm::{Buffer, DevCommRequirements, KERNELS, Kernels, LaunchConfig, Window};

use super::operation::{Call, Operation, calls_of_nccl};
use super::prelude::*;

/// The flags of `launch`.
#[derive(Args, Clone, Debug)]
pub struct Launch {}

impl Benchmark for Launch {
    const NAME: &'static str = "launch";

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        // Elements for each rank: one vector of 16 bytes.
        const COUNT: usize = 4;
        let (harness, ranks) = (job.harness, job.harness.rank.n_ranks());
        let load = || Ok(Kernels::load(harness.rank.context(), &KERNELS)?);
        let compiled = job.selection.make(Variant::Rust, load)?;
        let collectives = harness.collectives().build(harness.comm)?;
        let dev_comm = harness.comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        let nccl = job.nccl()?;
        job.begin()?;
        let windows = [harness.comm.window(ranks * COUNT)?, harness.comm.window(ranks * COUNT)?];
        let [send, recv] = windows.each_ref().map(Buffer::device_slice);
        let call = Call::<f32>::new(harness, Operation::AllToAll, false, [send, recv])?;
        let bytes = COUNT * size_of::<f32>();
        let messages = MessagesArgs {
            bytes,
            input_stride: bytes,
            output_bytes: ranks * bytes,
            sender: Messages::ALL,
        };
        let config = LaunchConfig::new(1, 128);
        let mut contenders = Vec::new();
        if let Some(kernels) = &compiled {
            for (attributes, config) in [
                ("no attributes", config.without_cooperation()),
                ("cooperative", config),
                ("dependent", config.without_cooperation().with_dependent()),
                ("cooperative, dependent", config.with_dependent()),
            ] {
                let (dev_comm, input) = (&dev_comm, call.send.device_address());
                let (output, first) =
                    Window::<u8>::containing(&call.recv, harness.comm).context("no window")?;
                let work = move || {
                    let launch = push_exchange::args(dev_comm, input, &output, first, messages);
                    // SAFETY: the windows have a vector for each rank, and outlive the launches,
                    // which are on one stream.
                    unsafe { launch.config(config).launch(&kernels.on(&harness.stream)) }
                };
                let info = kernels.info::<push_exchange>()?;
                let contender = Contender::new(Variant::Rust, work, call.clone());
                let contender = contender.by_kernel(config, info);
                let contender = contender.by_algorithm(attributes.to_owned());
                contenders.push(Contender { asked: Some(attributes.to_owned()), ..contender });
            }
        }
        contenders.extend(job.selection.make(Variant::RustOps, || {
            call.clone().by_collectives(Variant::RustOps, &collectives)
        })?);
        contenders.extend(calls_of_nccl(job, &nccl, Operation::AllToAll, COUNT)?);
        let case = Case {
            size: ranks * bytes,
            count: COUNT,
            dtype: "f32",
            bus: Operation::AllToAll.bus(ranks),
            ..Case::NONE
        };
        job.compare(case, &contenders)
    }
}
