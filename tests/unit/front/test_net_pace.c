/* net_pace: the giver is never further ahead than the bound while takers take, is held up once by takers that hang, and is held again after
 * they have caught up. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "front/net/net_pace.h"

enum { ROUNDS = 250000, TAKERS = 4 };

struct rig {
  struct net_pace pace;
  _Atomic int64_t n_there, n_taken; /* what can be taken; what was */
};

static void *take_main(void *argument)
{
  struct rig *rig = argument;
  while (atomic_load(&rig->n_taken) < (int64_t)ROUNDS * TAKERS) {
    int64_t n = atomic_load(&rig->n_there);
    if (n <= 0 || !atomic_compare_exchange_strong(&rig->n_there, &n, n - 1)) {
      sched_yield();
      continue;
    }
    atomic_fetch_add(&rig->n_taken, 1);
    net_pace_take(&rig->pace);
  }
  return NULL;
}

static void test_giver_stays_within_the_bound_of_takers(void **state)
{
  struct rig rig = {.n_there = 0};
  pthread_t takers[TAKERS];
  int64_t n_given_up = 0;
  net_pace_init(&rig.pace);
  for (int i = 0; i < TAKERS; i++) assert_int_equal(pthread_create(&takers[i], NULL, take_main, &rig), 0);
  for (int64_t i = 0; i < (int64_t)ROUNDS * TAKERS; i++) {
    net_pace_give(&rig.pace);
    atomic_fetch_add(&rig.n_there, 1);
    bool is_waited = net_pace_wait(&rig.pace);
    n_given_up += !is_waited; /* a machine that runs no taker for 10 ms */
    if (is_waited) assert_in_range(atomic_load(&rig.pace.n_given), 0, NET_PACE_HIGH);
  }
  for (int i = 0; i < TAKERS; i++) pthread_join(takers[i], NULL);
  assert_int_equal(atomic_load(&rig.pace.n_given), 0);
  assert_true(n_given_up < (int64_t)ROUNDS * TAKERS);
  net_pace_fini(&rig.pace);
}

static void test_takers_that_hang_hold_the_giver_up_once(void **state)
{
  struct net_pace pace;
  net_pace_init(&pace);
  for (int i = 0; i < NET_PACE_HIGH - 1; i++) net_pace_give(&pace);
  assert_true(net_pace_wait(&pace)); /* below the bound nobody waits */
  net_pace_give(&pace);
  assert_false(net_pace_wait(&pace)); /* given up */
  assert_true(pace.is_late);
  for (int i = 0; i < 1000; i++) {
    net_pace_give(&pace);
    assert_false(net_pace_wait(&pace)); /* at once: 1,000 waits would be ten seconds */
  }
  int64_t n = atomic_load(&pace.n_given);
  for (; n > NET_PACE_LOW; n--) net_pace_take(&pace);
  assert_true(net_pace_wait(&pace)); /* they have caught up */
  assert_false(pace.is_late);
  while (atomic_load(&pace.n_given) < NET_PACE_HIGH) net_pace_give(&pace);
  assert_false(net_pace_wait(&pace)); /* and are waited for again */
  net_pace_fini(&pace);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_giver_stays_within_the_bound_of_takers), cmocka_unit_test(test_takers_that_hang_hold_the_giver_up_once)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
