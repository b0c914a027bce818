//! The sums of `wgmma`: a thread that reads them before it has waited for the products finds NaN.

use cuda_std::arch::SumsStep;

use crate::base::error::Site;
use crate::base::layout::POISON;

/// A thread's products in flight.
#[derive(Default)]
pub(crate) struct Products {
    /// The number of groups committed so far.
    committed: u32,
    /// The number of groups that the thread has waited for.
    ended: u32,
    in_flight: Vec<InFlight>,
    /// Whether `wgmma::fence` has been called since the last [`SumsStep::Fence`] that gave the
    /// thread sums, which it may have accessed since. This is one flag for all sums of the thread,
    /// although PTX needs the fence only before products of sums that the thread has accessed: so a
    /// product of other sums that follows is refused, too. (Sums are known only by their address,
    /// so sums that the thread has set since the fence cannot be told from those set before it.)
    fenced: bool,
}

/// Sums that are not in the thread's registers yet.
struct InFlight {
    /// The address of the array that stands for the thread's registers.
    address: usize,
    values: Vec<f32>,
    /// The group of the last product, from 1.
    group: u32,
    /// The last product.
    at: Site,
}

impl Products {
    pub(crate) fn commit(&mut self) {
        self.committed += 1;
    }

    /// Records that the thread has waited until at most `pending` groups have not ended.
    pub(crate) fn wait(&mut self, pending: u32) {
        self.ended = self.ended.max(self.committed.saturating_sub(pending));
    }

    /// Records a call of `wgmma::fence`. (`wgmma::fence_operand` is [`SumsStep::Fence`].)
    pub(crate) fn fence(&mut self) {
        self.fenced = true;
    }

    /// Performs a step of the sums in an array, which stands for registers of the thread and is
    /// identified by its address.
    ///
    /// # Errors
    ///
    /// Fails for a product whose sums the thread may have written since the last `wgmma::fence`.
    pub(crate) fn step(
        &mut self,
        sums: &mut [f32],
        step: SumsStep,
        at: Site,
    ) -> Result<(), &'static str> {
        let address = sums.as_ptr().addr();
        let known = self.in_flight.iter().position(|sums| sums.address == address);
        match (step, known) {
            (SumsStep::Begin, Some(index)) => sums.copy_from_slice(&self.in_flight[index].values),
            (SumsStep::Begin, None) if !self.fenced => {
                return Err("a product whose sums are in the thread's registers: `wgmma::fence` \
                            before it is missing");
            }
            (SumsStep::Fence, Some(index)) if self.in_flight[index].group <= self.ended => {
                sums.copy_from_slice(&self.in_flight.swap_remove(index).values);
                self.fenced = false;
            }
            (SumsStep::End, known) => {
                let (values, group) = (sums.to_vec(), self.committed + 1);
                let new = InFlight { address, values, group, at };
                match known {
                    Some(index) => self.in_flight[index] = new,
                    None => self.in_flight.push(new),
                }
                sums.fill(f32::from_bits(POISON));
            }
            // A first product after `wgmma::fence`; a `fence_operand` of sums that are in the
            // registers; or one before the wait for their product, after which the thread reads
            // NaN.
            _ => {}
        }
        Ok(())
    }

    /// Ends the thread's products. Returns the line of a product whose sums have not come into the
    /// registers: they do so at the `fence_operand` that follows the wait for the product's group,
    /// so one of these two is missing.
    pub(crate) fn end(&mut self) -> Option<Site> {
        std::mem::take(self).in_flight.first().map(|sums| sums.at)
    }
}
